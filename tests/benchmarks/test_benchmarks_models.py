"""Layers and models of the benchmarks, small enough for a CPU: their variants compute alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from benchmarks import block, experts, head, hf_llama, lora, memory, popular, saved, shards
from benchmarks.llama import Shape, stack, step
from benchmarks.routing import combined, inverse, permuted, rows_of_tokens
from benchmarks.timing import Call
from blocktensor import (
    BlockwiseFP8Weight,
    MinSizes,
    convert,
    share_inputs,
    to_blockwise_fp8_weights,
)
from tests.support.compiling import assert_as_eager, fresh, graphs
from tests.support.mlps import fused_in
from tests.support.models import randn
from tests.support.norms import fused_norms

TINY = Shape(dim=64, hidden=160, heads=4, kv_heads=2)
SHARD = Shape(dim=256, hidden=1024, heads=16, kv_heads=8)
EXPERTS = experts.Shape(experts=3, tokens=40, dim=128, hidden=256)
ROWS = EXPERTS.experts * EXPERTS.tokens


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversion leaves no small layer in bf16."""

    def converted(model: nn.Module, *recipe: Any, **options: Any) -> Any:
        return convert(model, *recipe, **{"skip_small": MinSizes(0, 0, 0), **options})

    monkeypatch.setattr(block.bt, "convert", converted)


class Kind(NamedTuple):
    """A layer of a benchmark in several variants, and what they have in common."""

    variants: tuple[str, ...]
    make: Callable[[str], nn.Module]
    call: Callable[[nn.Module, Tensor, Tensor], Call]
    x: tuple[int, ...]
    weights: int


def same_base(make: Callable[[], nn.Module], variant: Callable[..., nn.Module]) -> Any:
    def made(name: str) -> nn.Module:
        torch.manual_seed(0)
        return variant(name, make())

    return made


def run_whole(model: nn.Module, x: Tensor, grad: Tensor) -> Call:
    return step(model, model, x, grad)


KINDS = {
    "block": Kind(
        block.VARIANTS,
        same_base(lambda: stack(TINY, 2, "cpu"), block.variant),
        run_whole,
        (2, 8, TINY.dim),
        14,
    ),
    "shards": Kind(
        shards.VARIANTS,
        same_base(lambda: shards.Shard(SHARD).to(torch.bfloat16), shards.variant),
        run_whole,
        (24, SHARD.dim),
        7,
    ),
    "experts": Kind(
        experts.VARIANTS,
        lambda name: experts.variant(name, EXPERTS, "cpu"),
        lambda model, x, grad: experts.step(model, x, grad, experts.ends(EXPERTS, "cpu")),
        (ROWS, EXPERTS.dim),
        3,
    ),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_all_variants_compute_alike_and_cast_weights_once_a_step(kind: Kind) -> None:
    x, grad = randn(*kind.x, grad=True), randn(*kind.x, seed=1)
    gradients: dict[str, list[Tensor]] = {}
    for name in kind.variants:
        model = kind.make(name)
        weights = [p for p in model.parameters() if isinstance(p, BlockwiseFP8Weight)]
        assert len(weights) == (0 if name == "bf16" else kind.weights)
        call = kind.call(model, x, grad)
        call()
        call()
        casts = 4 if "cache_weight=False" in name else 2
        assert all(weight.cache.casts == casts for weight in weights)
        assert x.grad is not None
        gradients[name] = [x.grad, *[p.grad for p in model.parameters() if p.grad is not None]]
    fp8 = gradients.pop("fp8")
    for name, found in gradients.items():
        of_weights_alone = "1x128" in name or "high_precision" in name
        for index, (a, b) in enumerate(zip(found, fp8, strict=True)):
            if name == "bf16" or (of_weights_alone and b.ndim > 1 and index > 0):
                assert 0 < (a - b).norm() < 0.15 * a.norm()
            else:
                assert torch.equal(a, b), (name, index)


def test_what_is_shared_and_fused() -> None:
    for name in shards.VARIANTS:
        assert len(fused_in(KINDS["shards"].make(name))) == ("fused" in name)
    shapes = {tuple(p.shape) for p in shards.Shard(SHARD).parameters()}
    assert shapes == {(32, 256), (16, 256), (256, 32), (128, 256), (256, 128)}
    kind = KINDS["experts"]
    layer = kind.make("fp8, inputs shared")
    call = kind.call(layer, randn(*kind.x, grad=True), randn(*kind.x, seed=1))
    call()
    call()
    (hooked,) = share_inputs(layer).groups
    assert (hooked.casts, hooked.saved) == (4, 2), "of two inputs in two steps"
    assert experts.ends(EXPERTS, "cpu")[-1] == ROWS


def test_a_block_compiles_in_one_graph() -> None:
    with fresh():
        assert_as_eager(block.variant("fp8", stack(TINY, 1, "cpu")), randn(2, 8, TINY.dim))
        assert graphs() == 1


@pytest.mark.parametrize("name", experts.VARIANTS)
def test_the_step_whose_peak_is_measured_makes_its_input(name: str) -> None:
    layer = experts.variant(name, EXPERTS, "cpu")
    row = randn(1, EXPERTS.dim, grad=True)
    offs = experts.ends(EXPERTS, "cpu")
    experts.step_of_model(layer, ROWS, row, offs)()
    assert row.grad is not None
    assert all(w.grad is not None and w.grad.any() for w in layer.parameters())
    x = row.detach().expand(ROWS, -1).contiguous().requires_grad_()
    experts.step(layer, x, torch.ones_like(x), offs)()
    assert x.grad is not None
    torch.testing.assert_close(row.grad, x.grad.float().sum(0, True).bfloat16(), rtol=2**-6, atol=1)


def test_a_row_says_what_bounds_the_layer() -> None:
    ms, peaks = {"bf16": 3.0, "fp8": 2.0}, {"bf16": 2**22, "fp8": 3 * 2**20}
    saved, layer = {"bf16": 2**21, "fp8": 2**20}, experts.LAYERS[0]
    row = experts.layer_row("fp8", layer, ms, peaks, saved, {"gemms": 1500.04, "copies": 0.0})
    assert row == {
        **{"what": "layer", "experts": 8, "tokens": 8192, "dim": 7168, "hidden": 2048},
        **{"variant": "fp8", "ms": 2.0, "speedup": 1.5, "peak_mib": 3.0, "peak_of_bf16": 0.75},
        **{"saved_mib": 1.0, "saved_of_bf16": 0.5, "gemms_us": 1500.0, "copies_us": 0.0},
    }
    ms, peaks = ({f"{name}/eager": x for name, x in of.items()} for of in (ms, peaks))
    model = experts.model_row("fp8", experts.MODELS[0], ms, peaks)
    assert (model["tokens"], model["speedup"], model["peak_of_bf16"]) == (16384, 1.5, 0.75)


def test_variants_of_a_head_compute_one_loss() -> None:
    x, target = randn(140, 256), torch.arange(140) % 300
    losses = {}
    for name, (is_fp8, loss) in head.variants().items():
        if "compiled" in name:
            continue
        module = nn.Linear(256, 300, bias=False, dtype=torch.bfloat16)
        torch.nn.init.normal_(module.weight, std=0.05, generator=torch.Generator().manual_seed(0))
        if is_fp8:
            to_blockwise_fp8_weights(module)
        assert isinstance(module.weight, BlockwiseFP8Weight) == is_fp8
        losses[name] = loss(x, module, target).item()
    assert losses["fp8"] == losses["fp8, in chunks"] != losses["bf16"]


QWEN3 = experts.Qwen3(
    128, 4, 128, layers=1, top_k=2, vocab=64, batch=2, time=16, filter_small=False
)
LLAMA = hf_llama.Shape(128, 192, heads=2, kv_heads=1, layers=2, vocab=64, batch=2, time=16)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_models_of_transformers_train(family: str) -> None:
    pytest.importorskip("transformers")
    shape: Any = {"qwen3": QWEN3, "llama": LLAMA}[family]
    make: Any = {"qwen3": experts.make_qwen3, "llama": hf_llama.make_model}[family]
    tokens, losses = torch.arange(32).view(2, 16), {}
    for name in {"qwen3": experts.MODEL_VARIANTS, "llama": hf_llama.VARIANTS}[family]:
        model = make(name, shape=shape, device="cpu")
        assert isinstance(model.lm_head.weight, BlockwiseFP8Weight) == ("head" in name)
        if family == "llama":
            assert len(fused_in(model)) == (2 if "fused" in name else 0)
            assert len(fused_norms(model)) == (4 if "fused" in name else 0)
        else:
            stacks = [p for p in model.parameters() if p.ndim == 3]
            assert [isinstance(p, BlockwiseFP8Weight) for p in stacks] == [name != "bf16"] * 2
        before = [p.detach().clone() for p in model.parameters()]
        hf_llama.step(model, hf_llama.adamw(model), tokens)()
        # of bf16, some weights round to what they were
        moved = [(p != old).any().item() for p, old in zip(model.parameters(), before, strict=True)]
        assert sum(moved) > len(moved) // 2
        assert all(p.grad is None for p in model.parameters())
        losses[name] = model(input_ids=tokens, labels=tokens).loss.item()
    if family == "llama":
        bf16, *fp8 = (losses[name] for name in hf_llama.VARIANTS[:4])
        assert bf16 != fp8[0]
        assert fp8 == [fp8[0]] * 3


POPULAR = {
    "Qwen3": {},
    "Llama": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}


@pytest.mark.parametrize("family", POPULAR)
def test_layers_of_popular_models(family: str) -> None:
    pytest.importorskip("transformers")
    of = popular.Model(family, 128, 256, 2, 1, layers=1, head_dim=64, others=POPULAR[family])
    tokens, found = torch.arange(32).view(2, 16), []
    for name in popular.VARIANTS:
        model = popular.make_model(name, of, "cpu")
        popular.step(model, tokens)()
        assert all(p.grad is not None for p in model.parameters())
        weights = [p for p in model.parameters() if isinstance(p, BlockwiseFP8Weight)]
        found.append((len(weights), len(fused_norms(model))))
    of_layers = 6 if family == "Qwen3Moe" else 7
    norms = {"Qwen3": 4, "Llama": 2, "Qwen3Moe": 3}[family]
    assert found == [(0, 0), (of_layers, 0), (of_layers, norms)]


def test_captured_attention_gets_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("transformers.masking_utils")
    model = popular.make_model("bf16", popular.Model("Llama", 128, 256, 2, 1, layers=1), "cpu")
    tokens = torch.arange(32).view(2, 16)
    eager = model(tokens).logits
    monkeypatch.setattr(utils, "is_tracing", lambda tensor: True)  # as while a stream is captured
    masks = []
    monkeypatch.setitem(
        utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping,
        "sdpa",
        lambda **given: masks.append(utils.sdpa_mask(**given)) or masks[-1],
    )
    model(tokens)
    assert masks.pop() is not None  # what `causal_attention` avoids
    with popular.causal_attention(model):
        assert torch.equal(model(tokens).logits, eager)
    assert masks == []


MEMORY = Shape(dim=256, hidden=640, heads=4, kv_heads=2)
TOKENS = 2 * 96


def test_what_eager_saves_by_policy() -> None:
    got = {}
    for policy, change in memory.POLICIES.items():
        model = stack(MEMORY, 1, "cpu")
        change(model)
        got[policy] = memory.saved_bytes(model, model, randn(2, TOKENS // 2, MEMORY.dim, grad=True))
    assert got["fp8, inputs shared"] == got["fp8, inputs shared, cache_weight=False"]
    # in bf16 q, k, v share what they save, and gate and up; the input of o is saved by attention
    dim, hidden = TOKENS * MEMORY.dim, TOKENS * MEMORY.hidden
    of_dim, of_hidden = (  # an element, and scales of two blocks of tokens in rows of 16 bytes
        elements + 16 * -(-elements // TOKENS // 128) - 8 for elements in (dim, hidden)
    )
    inputs = 2 * dim + hidden
    assert got["fp8, inputs shared"] - got["bf16"] == 3 * of_dim + of_hidden - 2 * inputs
    assert got["fp8"] - got["fp8, inputs shared"] == 3 * of_dim
    # without weight gradients no linear saves its input
    assert got["fp8, frozen"] == got["bf16, frozen"]
    assert got["bf16, frozen"] <= got["bf16"] - 2 * inputs


SAVED = hf_llama.Shape(hidden=512, inner=640, heads=4, kv_heads=2, layers=2, vocab=8)


def test_variants_that_save_in_fp8_save_less_and_compute_the_same() -> None:
    pytest.importorskip("transformers")
    x, grad = randn(1, 128, SAVED.hidden, grad=True), randn(1, 128, SAVED.hidden, seed=1)
    outputs: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    bytes_saved: dict[str, int] = {}
    for name in saved.VARIANTS:
        model = saved.make_model(name, SAVED, "cpu")
        step = saved.Step(model, model, x, grad, saved.IN_FP8 in name)
        step()
        gradients[name] = model.layers[1].mlp.down_proj.weight.grad
        outputs[name] = step.forward()
        step.drop_gradients()
        assert x.grad is None
        if saved.IN_FP8 in name:
            bytes_saved[name] = step.context.bytes_after  # type: ignore[union-attr]
            assert step.context.bytes_before > bytes_saved[name]  # type: ignore[union-attr]
    for name, output in outputs.items():
        assert torch.equal(output, outputs[name.partition(",")[0]])
        noise = (gradients[name] - gradients["bf16"]).float().norm()
        assert noise < gradients["bf16"].float().norm() / 10  # 20 dB
        assert torch.equal(gradients[name], gradients["bf16"]) == (
            name in ("bf16", "bf16, checkpoints")
        )
    least, half, checkpoints = (bytes_saved[name] for name in saved.VARIANTS[-3:])
    assert checkpoints < half < least < bytes_saved["fp8, saved in FP8"]


def test_lora_trains_the_same_adapters_on_both_bases() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    of = popular.Model("Llama", 128, 256, 2, 1, layers=1, head_dim=64)
    tokens, found = torch.randint(1024, (2, 128)), {}
    for name in lora.VARIANTS:
        model = lora.make_model(name, of, "cpu")
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        assert len(trained) == 2 * 7
        dtype = torch.float32 if "fp32" in name else torch.bfloat16
        assert {p.dtype for p in trained.values()} == {dtype}
        model(input_ids=tokens, labels=tokens).loss.backward()
        found[name] = torch.cat([p.grad.float().flatten() for p in trained.values()])
    for name, grad in found.items():
        wanted = found[name.replace("fp8", "bf16")]
        assert torch.equal(grad, wanted) == name.startswith("bf16")
        assert wanted.norm() > 0
        assert (grad - wanted).norm() < wanted.norm() / 10


def test_tokens_go_to_their_experts_and_back() -> None:
    tokens, top_k, dim = 9, 3, 16
    order = torch.randperm(tokens * top_k)
    back = inverse(order)
    sizes = ((tokens, dim), (tokens, top_k), (tokens * top_k, dim))
    x, weights, scales = leaves = [
        randn(*size, seed=i, grad=True).float() for i, size in enumerate(sizes)
    ]
    rows = permuted(rows_of_tokens(x, order, back, top_k), back, order)
    assert torch.equal(rows, x.repeat_interleave(top_k, 0))
    got = combined(permuted(rows * scales, order, back), weights, order, back)
    wanted = (x.unsqueeze(1) * (scales.view(tokens, top_k, dim) * weights.unsqueeze(-1))).sum(1)
    grad = randn(tokens, dim, seed=9, dtype=torch.float32)
    found, reference = (torch.autograd.grad(y, leaves, grad) for y in (got, wanted))
    torch.testing.assert_close((got, *found), (wanted, *reference))
