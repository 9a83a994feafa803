"""Mixtures of experts there and back through transformers, in FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("safetensors")
pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.17")

from safetensors.torch import save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from blocktensor import (
    BlockwiseFP8Tensor,
    Recipe,
    convert,
    load_fp8,
    save_fp8,
    unfreeze,
)
from tests.support.checkpoint_experts import read, stack_scales
from tests.support.checkpoint_models import assert_same, bits, state
from tests.support.moe_models import TOKENS, transformers_moe

KINDS = ("qwen3", "mixtral", "deepseek")
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "v_head_dim": 64}
ROPE = {"qk_rope_head_dim": 128, "qk_nope_head_dim": 64}
FP8_WEIGHTS = {"qwen3": 12, "mixtral": 12, "deepseek": 18}


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps FP8 layers on a CPU if it does not look for a GPU."""
    monkeypatch.setattr(
        FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None
    )


@pytest.fixture
def dequantizing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def moe(kind: str, n: int = 256, seed: int = 0) -> Any:
    """A tiny one in bf16, all of whose weights are whole blocks if ``n`` is."""
    options: dict[str, Any] = {"moe_intermediate_size": n, "hidden_size": 256}
    options["intermediate_size"] = n if kind == "mixtral" else 256
    options |= LATENT | ROPE if kind == "deepseek" else {}
    model = transformers_moe(kind, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.bfloat16()


def converted(model: Any, recipe: Recipe | None = None, frozen: bool = False) -> Any:
    model.requires_grad_(not frozen)
    convert(model, recipe or Recipe(), auto_filter_small_kn=False)
    return model


RECIPES = [Recipe(), Recipe(scale="power_of_two")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES, ids=["fp32", "pow2"])
@pytest.mark.usefixtures("dequantizing")
def test_it_dequantizes_our_bytes_as_we_do(tmp_path: Path, kind: str, recipe: Recipe) -> None:
    folder = save_fp8(converted(moe(kind), recipe), tmp_path / "fp8")
    theirs, info = type(moe(kind)).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    ours = moe(kind, seed=1)
    assert len(load_fp8(ours, folder, recipe=recipe).fp8) == FP8_WEIGHTS[kind]
    for name, weight in theirs.named_parameters():
        mine = ours.get_parameter(name)
        values = mine.dequantize() if isinstance(mine, BlockwiseFP8Tensor) else mine
        assert torch.equal(weight, values), name
    # what it has loaded is saved under the same names
    again = save_fp8(converted(theirs, recipe), tmp_path / "again")
    assert read(again).keys() == read(folder).keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [256, 128, 192])
@pytest.mark.parametrize("expert_names", ["auto", "fused"])
@pytest.mark.usefixtures("keeping")
def test_its_fp8_experts_hold_our_bytes(
    tmp_path: Path, kind: str, n: int, expert_names: str
) -> None:
    """Also where gate and up share blocks: those stacks are stored whole."""
    source = converted(moe(kind, n), frozen=True)
    folder = save_fp8(source, tmp_path / "fp8", expert_names=expert_names)
    whole = "model.layers.1.mlp.experts.down_proj_scale_inv"
    assert (whole in read(folder)) == (expert_names == "fused" or n == 192)
    model, info = type(source).from_pretrained(folder, device_map="cpu", output_loading_info=True)
    assert not any(info.values()), info
    assert type(model.model.layers[1].mlp.experts).__name__ == "FP8Experts"
    held = dict(model.named_parameters())
    for name, weight in source.named_parameters():
        x = held.pop(name)
        if isinstance(weight, BlockwiseFP8Tensor):
            data, scale, _ = weight.rowwise()
            assert torch.equal(bits(x), bits(data)), name
            assert torch.equal(held.pop(f"{name}_scale_inv"), scale), name
        else:
            assert torch.equal(x, weight), name
    assert held == {}
    # and what it writes of them is what we read
    model.save_pretrained(tmp_path / "theirs")
    loaded = moe(kind, n, seed=1)
    load_fp8(loaded, tmp_path / "theirs")
    assert_same(state(loaded), state(source))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("n", [256, 128])
@pytest.mark.usefixtures("keeping")
def test_we_read_what_it_quantizes(tmp_path: Path, kind: str, scale_fmt: str, n: int) -> None:
    """As the installed one saves it, and as 5.23 does: with scales of stacks beside matrices."""
    source = moe(kind, n)
    source.save_pretrained(tmp_path / "bf16")
    quantized = type(source).from_pretrained(
        tmp_path / "bf16",
        quantization_config=FineGrainedFP8Config(scale_fmt=scale_fmt),
        device_map="cpu",
    )
    quantized.save_pretrained(tmp_path / "installed")
    stored = read(tmp_path / "installed")
    experts = "block_sparse_moe.experts" if kind == "mixtral" else "mlp.experts"
    stack_scales(stored)
    assert f"model.layers.1.{experts}.3.w1.weight_scale_inv" not in stored
    assert f"model.layers.1.{experts}.gate_up_proj_scale_inv" in stored
    (tmp_path / "5.23").mkdir()
    save_file(stored, tmp_path / "5.23" / "model.safetensors")

    held = dict(quantized.named_parameters())
    for folder in (tmp_path / "installed", tmp_path / "5.23"):
        plain, frozen = moe(kind, n, seed=1), converted(moe(kind, n, seed=2), frozen=True)
        for model in (plain, frozen):
            report = load_fp8(model, folder)
            assert len(report.fp8) == FP8_WEIGHTS[kind]
            for name in report.fp8:
                weight = model.get_parameter(name)
                data, scale, _ = weight.rowwise()
                assert torch.equal(bits(data), bits(held[name]))
                assert torch.equal(scale, held[f"{name}_scale_inv"].float())
                values = it_dequantizes(held[name], held[f"{name}_scale_inv"])
                assert torch.equal(weight.dequantize(), values)
        unfreeze(plain)
        stack = plain.model.layers[1].mlp.experts.gate_up_proj
        frozen_stack = frozen.model.layers[1].mlp.experts.gate_up_proj
        assert stack.requires_grad
        assert torch.equal(stack.master, frozen_stack.dequantize())
    plain(TOKENS).logits.float().square().mean().backward()
    assert stack.grad.abs().sum() > 0


def it_dequantizes(weight: Tensor, scale: Tensor) -> Tensor:
    """The values of a weight that transformers holds in FP8."""
    tensors = {"stack": weight.detach(), "stack_scale_inv": scale.detach().float()}
    values: list[Tensor] = Fp8Dequantize(None).convert(tensors)["stack"]
    return values[0].bfloat16()


@pytest.mark.usefixtures("dequantizing")
def test_stacks_that_it_cannot_dequantize(tmp_path: Path) -> None:
    """Without an error: what save_fp8's docstring warns of."""
    folder = save_fp8(converted(moe("qwen3")), tmp_path / "fp8", expert_names="fused")
    model, info = type(moe("qwen3")).from_pretrained(folder, output_loading_info=True)
    name = "model.layers.1.mlp.experts.down_proj"
    assert f"{name}_scale_inv" in info["unexpected_keys"]
    assert torch.equal(model.get_parameter(name), read(folder)[name].bfloat16())


@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
@pytest.mark.usefixtures("keeping")
def test_experts_that_stay_in_bf16(tmp_path: Path, kind: str) -> None:
    """The config tells it which, under the names of the checkpoint."""
    source = moe(kind)
    convert(source, auto_filter_small_kn=False, skip=["*.experts"])
    folder = save_fp8(source, tmp_path / "fp8")
    model, info = type(source).from_pretrained(folder, device_map="cpu", output_loading_info=True)
    assert not any(info.values()), info
    for layer, theirs in zip(source.model.layers, model.model.layers, strict=True):
        assert type(theirs.self_attn.q_proj).__name__ == "FP8Linear"
        for name, stack in layer.mlp.experts.named_parameters():
            assert torch.equal(theirs.mlp.experts.get_parameter(name), stack), name
