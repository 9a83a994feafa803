"""Adapters of peft on a frozen FP8 base: trained, merged and stored as on any other base."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("peft")

from peft import (
    BOFTConfig,
    HRAConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    RoadConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda

import blocktensor.integrations.peft  # noqa: F401
from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, convert, freeze, unfreeze
from tests.support.asserts import assert_no_marked_product
from tests.support.models import FP8_TYPES, Model, assert_same_bytes
from tests.support.moe_models import TOKENS, transformers_moe
from tests.support.steps import losses_of

DIM = 192  # a block and a half
INPUTS = torch.arange(48).view(4, 12)
TARGETS = (INPUTS * 7 + 3) % 50


def base(frozen: bool = True) -> Model:
    """Its blocks' linears in FP8, its head and embedding plain."""
    model = Model(DIM).bfloat16()
    convert(model, skip_small=False)
    if frozen:
        assert freeze(model) == [f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")]
    return model


def dequantized(model: nn.Module) -> nn.Module:
    """The same values in bf16."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        for name, p in list(module._parameters.items()):
            if isinstance(p, FP8_TYPES):
                value = p.dequantize() if isinstance(p, BlockwiseFP8Tensor) else p.master.clone()
                module._parameters[name] = nn.Parameter(value)
    return plain


def adapted(model: nn.Module, up: float = 0.0, **options: Any) -> PeftModel:
    """Adapters on all linears of the blocks; ``up``: the size of what peft starts as zeros."""
    torch.manual_seed(1)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["up", "down"], **options}
    made = get_peft_model(model, LoraConfig(**options))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in made.named_parameters():
        if "lora_B" in name and up:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * up)
    return made


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(INPUTS).float().flatten(0, 1), TARGETS.flatten())


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def train(model: nn.Module, steps: int, loss: Any = loss_of, lr: float = 0.5) -> list[float]:
    """Train what is trained for some steps; the losses before each."""
    return losses_of(lambda: loss(model), torch.optim.SGD(trained(model).values(), lr=lr), steps)


def frozen_forms(model: nn.Module) -> list[Tensor]:
    """Copies of the bytes and scales of the FP8 weights."""
    fp8 = [p for p in model.parameters() if isinstance(p, BlockwiseFP8Tensor)]
    assert len(fp8) == 4
    return [form.clone() for p in fp8 for form in (p.rowwise().data, p.rowwise().scale)]


def assert_unchanged(model: nn.Module, before: list[Tensor]) -> None:
    for a, b in zip(frozen_forms(model), before, strict=True):
        assert_same_bytes(a, b)


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@pytest.mark.parametrize("dora", [False, True])
def test_gradients_of_adapters_are_those_of_the_dequantized_base(dora: bool) -> None:
    model = base()
    plain, made = (adapted(m, up=0.02, use_dora=dora) for m in (dequantized(model), model))
    wanted = trained(plain)
    assert len(wanted) == 8 + 4 * dora
    assert all("lora_" in name for name in wanted)
    for name, parameter in trained(made).items():  # the norms of DoRA among them
        assert torch.equal(parameter, wanted[name]), name
    for one in (made, plain):
        loss_of(one).backward()
    for name, parameter in trained(made).items():
        assert parameter.grad.norm() > 0
        # noise of FP8; before the ReLU also the entries near zero that it switches
        bound = 0.2 if ".up." in name or "magnitude" in name else 0.07
        assert relative(parameter.grad, wanted[name].grad) < bound, name


@pytest.mark.parametrize("safe", [False, True])
def test_merging_into_a_frozen_base_is_refused(safe: bool) -> None:
    model = adapted(base(), up=0.02).eval()
    before, y = frozen_forms(model), model(INPUTS)
    error = r"merge an adapter.* blocktensor\.unfreeze.*; in 'blocks\.0\.up', a Linear"
    by = "" if safe else r", by 'blocks\.0\.up\.base_layer\.weight'"  # safe: a copy of it
    with pytest.raises(NotImplementedError, match=f"{error}{by}$"):
        model.merge_and_unload(safe_merge=safe)
    assert_unchanged(model, before)
    assert torch.equal(model(INPUTS), y)
    with pytest.raises(NotImplementedError, match=r"blocktensor\.unfreeze"):
        model.merge_adapter(safe_merge=safe)
    assert_unchanged(model, before)


@pytest.mark.parametrize("safe", [False, True])
def test_merging_into_an_unfrozen_base(safe: bool) -> None:
    model = adapted(base(), up=0.1).eval()
    values = {name: x.dequantize() for name, x in model.named_parameters() if type(x) in FP8_TYPES}
    deltas = {
        name: module.get_delta_weight("default")
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert len(deltas) == 4
    y = model(INPUTS)
    assert len(unfreeze(model)) == 4
    assert relative(model(INPUTS), y) < 0.03  # terms are added to the rounded output
    merged = model.merge_and_unload(safe_merge=safe)
    for name, delta in deltas.items():
        weight = merged.get_submodule(name.removeprefix("base_model.model.")).weight
        assert isinstance(weight, BlockwiseFP8Weight)
        exact = values[f"{name}.base_layer.weight"].float() + delta.float()
        # bf16: the delta may be rounded before the sum is, half an ulp each
        assert relative(weight.master, exact) < 2**-8
    assert len(freeze(merged)) == 4
    assert type(merged) is Model
    assert relative(base()(INPUTS), y) > 0.15  # what the adapters do
    assert relative(merged(INPUTS), y) < 0.05  # the sum is cast anew


ROTATIONS: dict[str, Any] = {
    "OFT": OFTConfig(oft_block_size=32),
    "BOFT": BOFTConfig(boft_block_size=32),
    "HRA": HRAConfig(r=4),
    "RoAd": RoadConfig(),
}
"""Adapters that multiply the weight."""


@pytest.mark.filterwarnings("ignore::UserWarning:peft.tuners.boft")  # its kernel is missing
@pytest.mark.parametrize("kind", ROTATIONS)
def test_adapters_that_multiply_weights_are_merged_in_high_precision(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # BOFT compiles a kernel, and would wait for the lock that a killed build has left
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    states = []
    for model in (base(frozen=False), Model(DIM).bfloat16()):
        config = copy.deepcopy(ROTATIONS[kind])
        config.target_modules = {"up", "down"}
        torch.manual_seed(1)
        made = get_peft_model(model.float(), config)
        with torch.no_grad():
            for parameter in trained(made).values():
                parameter.add_(torch.randn(parameter.shape) * 0.05)
        made.merge_adapter()
        merged = {name: value.clone() for name, value in made.state_dict().items()}
        made.unmerge_adapter()
        states.append((merged, made.state_dict()))
    for got, want in zip(*states, strict=True):
        for name, value in want.items():
            assert torch.equal(got[name], value), name


@pytest.mark.parametrize("kind", ["pissa_niter_4", "corda"])
def test_adapters_that_multiply_the_base_as_they_begin(kind: str) -> None:
    states = []
    for model in (base(frozen=False), Model(DIM).bfloat16()):
        options: Any = {"corda_config": CordaConfig()} if kind == "corda" else {}
        config = LoraConfig(r=4, target_modules=["0.up"], init_lora_weights=kind, **options)
        model = model.float()
        if kind == "corda":
            preprocess_corda(model, config, partial(model, INPUTS[:1]))
        torch.manual_seed(1)
        states.append(get_peft_model(model, config).state_dict())
    got, want = states
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def test_adapters_are_stored_without_their_base(tmp_path: Path) -> None:
    model = adapted(base(), up=0.02).eval()
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base(), tmp_path).eval()
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert 0 < stored < 2 * sum(p.nbytes for p in trained(model).values())
    assert torch.equal(again(INPUTS), model(INPUTS))
    assert not torch.equal(model(INPUTS), base()(INPUTS))


KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "PiSSA": {"init_lora_weights": "pissa"},
    "OLoRA": {"init_lora_weights": "olora"},
    "DoRA, dropout": {"use_dora": True, "lora_dropout": 0.1},
    "rsLoRA": {"use_rslora": True},
    "an adapted module saved whole": {"modules_to_save": ["blocks.0.up"]},
    "the head saved whole": {"modules_to_save": ["head"]},
    "matrices by name": {"target_modules": [], "target_parameters": ["up.weight", "down.weight"]},
}
READS_VALUES = {"PiSSA", "OLoRA"}
"""Adapters that write new values into the base, which a frozen one cannot take."""


either_base = pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])


@either_base
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters(kind: str, frozen: bool) -> None:
    if frozen and kind in READS_VALUES:
        with pytest.raises(NotImplementedError, match=r"call blocktensor\.unfreeze\(model\), then"):
            loss_of(adapted(base(), **KINDS[kind]))
        return
    made = adapted(base(frozen), **KINDS[kind])
    assert_no_marked_product(made, INPUTS)
    if frozen and kind == "an adapted module saved whole":  # it trains a frozen weight
        with pytest.raises(NotImplementedError, match=r"call blocktensor\.unfreeze\(model\) first"):
            train(made, steps=1)
        return
    losses = train(made, steps=3)
    assert losses[2] < losses[1] < losses[0]
    if not frozen:
        wanted, merged = loss_of(made), made.merge_and_unload()
        for block in merged.blocks:
            assert isinstance(block.up.weight, BlockwiseFP8Weight)
        assert loss_of(merged).item() == pytest.approx(wanted.item(), rel=0.02)


def loss_of_moe(model: Any) -> Tensor:
    loss: Tensor = model(TOKENS, labels=TOKENS).loss
    return loss


@either_base
@pytest.mark.parametrize("kind", ["deepseek", "qwen3", "mixtral", "glm4"])
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
def test_all_linears_of_a_mixture_of_experts(kind: str, frozen: bool) -> None:
    """Peft adapts the stacks of experts too, and adds the adapters' product to the stack."""
    model = transformers_moe(kind).bfloat16()
    options = {"target_modules": "all-linear", "init_lora_weights": False}
    convert(model, skip_small=False)
    if frozen:
        freeze(model)
    made, exact = (adapted(each, **options) for each in (model, dequantized(model)))
    losses = [loss_of_moe(each) for each in (made, exact)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=0.01)
    for loss in losses:
        loss.backward()
    wanted = trained(exact)
    stacks = [name for name in wanted if ".experts." in name]
    assert len(stacks) >= 4
    for name, parameter in trained(made).items():
        assert parameter.grad is not None and parameter.grad.count_nonzero(), name
        if name in stacks:
            assert relative(parameter.grad, wanted[name].grad) < 0.4, name
    assert_no_marked_product(made, TOKENS, labels=TOKENS)
    if frozen:  # and in evaluation
        with torch.no_grad():
            assert_no_marked_product(made.eval(), TOKENS, labels=TOKENS)
    course = train(made, steps=4, loss=loss_of_moe)
    assert course[3] < course[0]


@either_base
@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "the head saved whole"])
def test_unloading_gives_the_base_back(kind: str, frozen: bool) -> None:
    model = base(frozen)
    wanted = model(INPUTS)
    made = adapted(model, **KINDS[kind])
    train(made, steps=1)
    assert not torch.equal(made(INPUTS), wanted)
    back = made.unload()
    assert type(back) is Model
    if kind != "the head saved whole":  # peft keeps what it has trained
        assert torch.equal(back(INPUTS), wanted)
    fp8 = BlockwiseFP8Tensor if frozen else BlockwiseFP8Weight
    assert all(type(block.up.weight) is type(block.down.weight) is fp8 for block in back.blocks)


def test_preparing_a_frozen_base_for_few_bits_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"leave prepare_model_for_kbit_training out"):
        prepare_model_for_kbit_training(base())


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora"])
def test_adapters_from_the_values_of_a_frozen_base(init: str) -> None:
    """As the error says: unfreeze, get_peft_model, freeze."""
    with pytest.raises(NotImplementedError, match=r"unfreeze.*, then get_peft_model, then"):
        adapted(base(), init_lora_weights=init)
    model = base()
    y = model(INPUTS)
    unfreeze(model)
    made = adapted(model, init_lora_weights=init)
    assert len(freeze(made)) == 4
    assert all("lora_" in name for name in trained(made))
    assert relative(made(INPUTS), y) < 0.08  # what the adapters took from the base is rounded anew
    train(made, steps=1)
