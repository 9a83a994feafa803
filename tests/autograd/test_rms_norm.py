"""An RMS norm whose result exists in FP8 alone: the bits of transformers' norms."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, Recipe, functional, quantize
from blocktensor.ops.norm import reference
from blocktensor.overrides import dynamo
from tests.support.compiling import afresh  # noqa: F401
from tests.support.gated import assert_bits, results, unfused, weights
from tests.support.models import FP32_SCALES, POWER_OF_TWO, Trace, assert_same, complaint, randn

rms_norm = functional.rms_norm
K = 192
NORMS = {
    "llama": ("transformers.models.llama.modeling_llama", "LlamaRMSNorm"),
    "gemma": ("transformers.models.gemma.modeling_gemma", "GemmaRMSNorm"),
}
SQUARES = Recipe(wgrad_input="128x128")


def norm(kind: str, eps: float, weight: Tensor) -> nn.Module:
    module, name = NORMS[kind]
    made: Any = getattr(pytest.importorskip(module), name)(K, eps=eps)
    made.weight = nn.Parameter(weight)
    return made


def spread(*shape: int, **options: Any) -> Tensor:
    """Rows from tiny to huge, one of zeros."""
    x = randn(*shape, K, seed=3, **options)
    rows = x.detach().view(-1, K)
    for i, size in enumerate((1e-12, 1e-4, 1.0, 300.0, 1e10, 0.0)):
        rows[i::7] *= size
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("recipe", [FP32_SCALES, POWER_OF_TWO, SQUARES])
def test_bits(kind: Any, recipe: Recipe, dtype: torch.dtype, device: torch.device) -> None:
    ws = weights(recipe=recipe, dtype=dtype, device=device)
    x = spread(2, 75, device=device).clamp(-6e4, 6e4).to(dtype)
    x.requires_grad_()
    for eps in (1e-6, 1e-5):
        weight = randn(K, seed=8, dtype=dtype, device=device, grad=True)
        module = norm(kind, eps, weight.detach().clone())

        def plain(x: Tensor, _: Tensor, *ws: Tensor, module: nn.Module = module) -> Tensor:
            return both(module(x), *ws)

        def fused(x: Tensor, w: Tensor, *ws: Tensor, eps: float = eps) -> Tensor:
            return both(rms_norm(x, w, eps, kind, recipe), *ws)

        wanted = results(plain, x, [module.weight, *ws])
        assert_bits(results(fused, x, [weight, *ws]), wanted)


def both(n: Tensor, *ws: Tensor) -> Tensor:
    """An MLP and a third linear of one norm, whose gradients are summed."""
    return unfused(n, *ws)[..., :64] + torch.nn.functional.linear(n, ws[0])[..., :64]


@pytest.mark.parametrize("kind", NORMS)
def test_it_is_the_cast_of_the_norm(kind: Any) -> None:
    x, weight = spread(75), randn(K, seed=8)
    module = norm(kind, 1e-6, weight)
    for recipe in (FP32_SCALES, POWER_OF_TWO, SQUARES, Recipe(wgrad_input="high_precision")):
        made = rms_norm(x, weight, kind=kind, recipe=recipe)
        assert type(made) is BlockwiseFP8Tensor
        assert_same(made.detach(), quantize(module(x), recipe).detach())
    other = rms_norm(x, weight.float(), kind=kind)  # in fp32, as torch promotes
    assert_same(other, quantize(norm(kind, 1e-6, weight.float())(x)).detach())
    assert torch.equal(reference.rms_norm(x, weight, 1e-6, kind), module(x))
    with Trace() as trace:
        rms_norm(x, weight, kind=kind)
    assert [op for op in trace.ops if "blocktensor" in op] == ["blocktensor.quantize_both 1x128"]


@pytest.mark.parametrize("kind", NORMS)
def test_bits_where_torch_computes_the_norm(kind: Any) -> None:
    recipe = Recipe(wgrad_input="high_precision")
    w, weight = weights(recipe=recipe)[0], randn(K, seed=8, grad=True)
    module = norm(kind, 1e-6, weight.detach().clone())
    x = spread(75).requires_grad_()

    def fused(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.linear(rms_norm(x, weight, kind=kind, recipe=recipe), w)

    wanted = results(lambda x, _: torch.nn.functional.linear(module(x), w), x, [module.weight])
    assert_bits(results(fused, x, [weight]), wanted)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
@pytest.mark.parametrize("kind", NORMS)
def test_one_gradient(kind: Any, needs: tuple[bool, bool]) -> None:
    w = weights()[0]
    leaves = []
    for _ in range(2):
        x = randn(70, K).requires_grad_(needs[0])
        leaves.append((x, randn(K, seed=8).requires_grad_(needs[1])))
    module = norm(kind, 1e-6, leaves[0][1].detach())
    module.weight.requires_grad_(needs[1])
    torch.nn.functional.linear(module(leaves[0][0]), w).sum().backward()
    torch.nn.functional.linear(rms_norm(*leaves[1], kind=kind), w).sum().backward()
    for a, b in ((leaves[0][0].grad, leaves[1][0].grad), (module.weight.grad, leaves[1][1].grad)):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)  # type: ignore[arg-type]


# Dynamo itself instantiates the Functions that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
@pytest.mark.parametrize("kind", NORMS)
def test_compiled(kind: Any) -> None:
    dynamo.announce()

    def run(x: Tensor, w: Tensor, *ws: Tensor) -> Tensor:
        return functional.gated_mlp(rms_norm(x, w, kind=kind), *ws)

    x, operands = randn(70, K, grad=True), [randn(K, seed=8, grad=True), *weights()]
    wanted = results(run, x, operands)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_bits(results(compiled, x, operands), wanted)


def test_graphs_get_every_field_of_a_recipe() -> None:
    recipe = Recipe("power_of_two", False, "128x128")
    assert dynamo._fields(recipe) == dataclasses.astuple(recipe)


def test_bad_input() -> None:
    x = randn(70, K)
    assert_expected_inline(
        complaint(ValueError, lambda: rms_norm(x, x[0], kind="torch")),  # type: ignore[arg-type]
        """kind 'torch': expected one of llama, gemma""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: rms_norm(x, x)),
        """x has shape [70, 192] and the weight [70, 192]: expected [..., K] and [K]""",
    )
