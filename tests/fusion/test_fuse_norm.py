"""Norms that FP8 linears read are found and verified, and share one cast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import convert, fuse, share_inputs, unfuse
from blocktensor.distributed import ColwiseParallel
from tests.support.fused_kinds import count_runs, why_left_alone
from tests.support.gated import assert_bits
from tests.support.mlps import K, X, converted, results
from tests.support.models import POWER_OF_TWO, randn
from tests.support.norms import Block, Norm, OfTorch, blocks, fused_blocks, fused_norms
from tests.support.ranks import on_ranks, shared_mesh
from tests.support.siblings import watched_casts
from tests.support.steps import step


class Gemma(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.scaled(x) * (1.0 + self.weight.float())).to(x.dtype)


class Biased(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(K))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


def over_rms(x: Tensor, eps: float, change: Any = lambda mean: mean) -> Tensor:
    return x * torch.rsqrt(change(x.pow(2).mean(-1, keepdim=True)) + eps)


SCALED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "another epsilon": lambda x, eps: over_rms(x.float(), 1e-6),
    "an epsilon outside": lambda x, eps: x / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + eps),
    "centred": lambda x, eps: over_rms(x.float() - x.float().mean(-1, keepdim=True), eps),
    "in half": over_rms,
    "clamped": lambda x, eps: over_rms(x.clamp(-100.0, 100.0).float(), eps),
    "a stopped gradient": lambda x, eps: over_rms(x.float(), eps, Tensor.detach),
}
"""Forwards of norms that multiply by the weight in the dtype of x."""
FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "one rounding": lambda m, x: (m.scaled(x) * m.weight.float()).to(x.dtype),
    "by torch": lambda m, x: F.rms_norm(x, (K,), m.weight, m.variance_epsilon),
    "by torch in parts": lambda m, x: F.rms_norm(x, (K,), None, m.variance_epsilon) * m.weight,
}


def planted(name: str) -> Callable[[], nn.Module]:
    whole, inner = FORWARDS.get(name), SCALED.get(name)

    class Planted(Norm):
        def forward(self, x: Tensor) -> Tensor:
            if whole is not None:
                return whole(self, x)
            return self.weight * inner(x, self.variance_epsilon).to(x.dtype)  # type: ignore[misc]

    return Planted


PLANTED: dict[str, Callable[[], nn.Module]] = {
    **{name: planted(name) for name in (*SCALED, *FORWARDS)},
    "a bias": Biased,
    "a layer norm": lambda: nn.LayerNorm(K, bias=False),
    "no weight": lambda: nn.RMSNorm(K, elementwise_affine=False),
    "a weight of two dimensions": lambda: Norm((1, K)),
    "no epsilon": lambda: Norm(eps=1),
    "another forward": lambda: vars(norm := Norm()).update(forward=norm.scaled) or norm,
}


def test_planted_differences() -> None:
    reasons = []
    for name, make in PLANTED.items():
        model = converted(Block(make))
        reasons.append(f"{name}: {why_left_alone(model, 'input_layernorm')}")
        assert fused_norms(model) == []
    assert_expected_inline(
        "\n".join(reasons),
        """\
another epsilon: differs in its output
an epsilon outside: differs in its output
centred: differs in its output
in half: differs in its output
clamped: differs in its output
a stopped gradient: differs in the gradient of its input
one rounding: differs in its output
by torch: torch computes it in one kernel
by torch in parts: torch computes it in one kernel
a bias: has more than a weight: bias
a layer norm: differs in its output
no weight: it has no weight [K]
a weight of two dimensions: it has no weight [K]
no epsilon: has no epsilon (an attribute variance_epsilon, eps, epsilon, norm_eps)
another forward: its forward was replaced on the instance""",
    )


class GetsEpsilon(Norm):
    """Reads its epsilon by ``getattr``, from itself or from a config."""

    def scaled(self, x: Tensor) -> Tensor:
        config = getattr(self, "config", self)
        x = x.float()
        epsilon = getattr(config, "variance_epsilon", 1e-5)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)


@pytest.mark.parametrize(
    "change",
    [
        lambda norm: setattr(norm, "variance_epsilon", 0.5),
        lambda norm: setattr(norm, "config", SimpleNamespace(variance_epsilon=0.5)),
        lambda norm: delattr(norm, "variance_epsilon"),
    ],
    ids=["its epsilon", "a config", "a default"],
)
def test_an_epsilon_that_is_read_by_getattr(change: Callable[[Any], None]) -> None:
    models = fused_blocks(lambda: GetsEpsilon(eps=1e-3))
    for each in models:
        change(each.layers[0].input_layernorm)
    model, twin = models
    assert_bits(results(model), results(twin))
    assert count_runs(model, X.bfloat16()) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("norm", [Norm, Gemma, OfTorch])
def test_bits(norm: Any, dtype: torch.dtype, device: torch.device) -> None:
    names = {"fused": []} if norm is OfTorch else {}
    models = fused_blocks(norm, recipe=POWER_OF_TWO, dtype=dtype, **names)
    model, twin = (x.to(device) for x in models)
    for i, rows in enumerate((0, 1, 129)):
        x = randn(rows, K, seed=i, device=device)
        assert_bits(results(model, x), results(twin, x))
    # in fp32 gradients of x from elsewhere are added between those of the norm's two reads
    as_written = dtype == torch.float32
    norms = 0 if as_written else len(fused_norms(model))
    assert count_runs(model, x.to(dtype)) == norms + 2  # MLPs
    made = model.layers[0].input_layernorm(x.to(dtype))
    assert type(made) is torch.Tensor  # which anything may read


@pytest.mark.parametrize("norm", [Norm, Gemma])
def test_an_input_of_another_dtype_than_the_weight_runs_as_written(norm: Any) -> None:
    """With a weight in fp32 the result may be in fp32, and then so is its gradient."""
    norms = [x.layers[0].input_layernorm.float() for x in fused_blocks(norm)]
    assert_bits(*(step(each, randn(33, K)) for each in norms))
    assert count_runs(norms[0], randn(33, K)) == 0
    assert count_runs(norms[0].bfloat16(), randn(33, K)) == 1


@pytest.mark.parametrize("norm", [Norm, OfTorch, PLANTED["by torch"]])
def test_linears_share_one_cast_of_a_norm(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of attention, twice; fused MLPs cast once anyway."""
    model = blocks(norm)
    casts = watched_casts(monkeypatch)
    counts = []
    for _ in range(2):
        casts.clear()
        model(X.bfloat16())
        counts.append(len(casts))
        report = fuse(model)
    assert {x.reason for x in report.left_alone} == (
        set() if norm is Norm else {"torch computes it in one kernel"}
    )
    assert counts == [2 * (3 + 1 + 2 + 1), 2 * (1 + 1 + 1 + 1)]
    unfuse(model)
    casts.clear()
    model(X.bfloat16())
    assert len(casts) == counts[0]


class OfHeads(nn.Module):
    """Attention that normalizes the queries and keys of each head, as Qwen3 does."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj"):
            self.add_module(name, nn.Linear(K, 256, bias=False))
        self.q_norm, self.k_norm = Norm(128), Norm(128)

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:-1], -1, 128)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        return (q * k.sigmoid()).transpose(1, 2).flatten(-2)


def test_norms_of_queries_and_keys(device: torch.device) -> None:
    model = nn.Sequential(OfHeads()).to(device, torch.bfloat16)
    convert(model, skip=["*.k_proj"], skip_small=False)
    twin = copy.deepcopy(model)
    assert_expected_inline(
        str(fuse(model)),
        """\
module    class  computes        result
--------  -----  --------------  -----------------------------------
0.q_norm  Norm   norm of q_proj  fused
0.k_norm  Norm   norm of k_proj  none of its linear layers is in FP8
1 fused, 1 left alone""",
    )
    x = randn(2, 65, K, device=device)
    assert_bits(results(model, x), results(twin, x))
    assert count_runs(model, x.bfloat16()) == 1


def test_sharing_that_was_asked_for_outlives_unfuse() -> None:
    model = blocks()
    fuse(model)
    report = share_inputs(model)
    unfuse(model)
    for _ in range(2):
        model(X.bfloat16())
    assert report.saved == 2 * 2 * (2 + 1)


def test_the_report() -> None:
    model = blocks()
    model.layers[1].self_attn.k_proj = nn.Linear(K, K, bias=False, dtype=torch.bfloat16)
    convert(model.layers[1].self_attn, skip=["k_proj"], skip_small=False)
    report = fuse(model)
    assert_expected_inline(
        "\n".join(f"{x.name}: {x.reason or x.computes}" for x in report.entries[2:]),
        """\
layers.0.input_layernorm: norm for q_proj, k_proj, v_proj of self_attn
layers.0.post_attention_layernorm: norm for gate_proj, up_proj of mlp
layers.1.input_layernorm: norm for q_proj, k_proj, v_proj of self_attn
layers.1.post_attention_layernorm: norm for gate_proj, up_proj of mlp""",
    )
    assert "layers.*.post_attention_layernorm (2)" in str(report)
    assert count_runs(model, X.bfloat16()) == 6
    assert fuse(converted(Block())).left_alone == ()  # of a module without a parent


def test_torch_func_runs_as_written() -> None:
    model, twin = fused_blocks()
    x = X.bfloat16()
    for each in (model, twin):
        each.requires_grad_(False)
    outputs = [torch.func.vmap(each.layers[0].input_layernorm)(x[None]) for each in (model, twin)]
    assert torch.equal(*outputs)


@on_ranks(2)
def test_tensor_parallel_readers(world: int, device: str) -> None:
    mesh = shared_mesh(device, 1, world, names=("data", "tensor"))["tensor"]
    model, twin = (x.to(device) for x in fused_blocks())
    for each in (model, twin):
        for layer in each.layers:
            for name in ("q_proj", "v_proj"):
                style = ColwiseParallel(output_layouts=Replicate())
                parallelize_module(layer.self_attn, mesh, {name: style})
    x = X.to(device)
    assert_bits(results(model, x), results(twin, x))
    assert count_runs(model, x.bfloat16()) == 6
