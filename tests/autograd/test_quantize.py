"""The differentiable cast of an activation, and the RMS norms whose results are cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, Recipe, functional, quantize
from blocktensor.ops.norm import reference
from tests.support.gated import K, assert_bits, results, unfused, weights
from tests.support.linear_ways import ROWS, saved_by
from tests.support.models import FP32_SCALES, POWER_OF_TWO, linear, randn


def test_a_shared_activation_is_cast_and_saved_once() -> None:
    gate, up, shared = linear(256, 384), linear(128, 384), quantize(randn(5, 384, grad=True))
    saved = saved_by(lambda: [gate(shared), up(shared)])
    pointers = [t.data_ptr() for t in saved if t.dtype == torch.float8_e4m3fn]
    assert pointers == [shared.columnwise_data.data_ptr()] * 2


@pytest.mark.parametrize("shape", [(7,), (3, 200), (2, 3, 200), (0, 200)])
def test_quantize_is_straight_through(shape: tuple[int, ...]) -> None:
    x, w = randn(*shape, grad=True), randn(130, shape[-1], seed=1)
    shared = quantize(x)
    assert type(shared) is BlockwiseFP8Tensor
    assert (shared.shape, shared.dtype, shared.requires_grad) == (x.shape, x.dtype, True)
    y = functional.linear(shared, w)
    grad = randn(*y.shape, seed=3)
    (direct,) = torch.autograd.grad(functional.linear(x, w), x, grad)
    y.backward(grad)
    assert torch.equal(x.grad, direct)
    assert quantize(shared) is shared
    assert not quantize(x.detach()).requires_grad
    with torch.no_grad():
        assert not quantize(x).requires_grad


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda q: q,
    "rows": lambda q: q[128:],
    "a row's block": lambda q: q[:, 128:256],
    "clone": lambda q: q.clone(),
    "leading dimensions": lambda q: q.view(2, 128, 384),
    "transpose": lambda q: q.t(),
    "chunk": lambda q: q.chunk(2)[1],
    "another dtype": lambda q: q.to(torch.float32),
}


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", PARTS)
def test_the_gradient_of_dequantized_values_passes_straight_through(
    part: str, dtype: torch.dtype | None
) -> None:
    x = randn(256, 384, grad=True)
    taken = PARTS[part](quantize(x))
    values = taken.dequantize(dtype)
    assert type(values) is Tensor
    assert values.dtype == (dtype or taken.dtype)
    grad = randn(*values.shape, seed=3).to(values.dtype)
    values.mul_(1).backward(grad)  # a caller may change them in place
    x.grad, got = None, x.grad
    PARTS[part](x).backward(grad.to(taken.dtype))
    assert got is not None and x.grad is not None and torch.equal(got, x.grad)


def test_the_values_of_a_weights_fp8_form_are_plain_and_differentiable() -> None:
    """For a product in high precision of what the FP8 products read."""
    module, x = linear(256, 384), randn(5, 384)
    frozen = module.weight._quantized()
    for values in (module.weight.dequantize(), module.weight.t().dequantize().t()):
        assert type(values) is Tensor
        assert torch.equal(values, frozen.dequantize())
        module.zero_grad()
        torch.nn.functional.linear(x, values).sum().backward()
        assert torch.equal(module.weight.grad, torch.ones(5, 256, dtype=x.dtype).t() @ x)
    with torch.no_grad():
        assert not module.weight.dequantize(torch.float32).requires_grad


NORMS = {
    "llama": ("transformers.models.llama.modeling_llama", "LlamaRMSNorm"),
    "gemma": ("transformers.models.gemma.modeling_gemma", "GemmaRMSNorm"),
}


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
@pytest.mark.parametrize("recipe", [FP32_SCALES, POWER_OF_TWO, ROWS])
def test_bits_of_a_norm(
    kind: Any, recipe: Recipe, dtype: torch.dtype, device: torch.device
) -> None:
    ws = weights(recipe=recipe, dtype=dtype, device=device)
    x = spread(2, 75, device=device).clamp(-6e4, 6e4).to(dtype)
    x.requires_grad_()
    for eps in (1e-6, 1e-5):
        weight = randn(K, seed=8, dtype=dtype, device=device, grad=True)
        module = norm(kind, eps, weight.detach().clone())
        values = module(x)
        made = functional.rms_norm(x, weight, eps, kind=kind)
        assert torch.equal(made.mul_(1), values)  # also in place
        assert torch.equal(reference.rms_norm(x, weight, eps, kind), values)

        def plain(x: Tensor, _: Tensor, *ws: Tensor, module: nn.Module = module) -> Tensor:
            return both(module(x), *ws)

        def fused(x: Tensor, w: Tensor, *ws: Tensor, eps: float = eps) -> Tensor:
            return both(quantize(functional.rms_norm(x, w, eps, kind=kind), recipe), *ws)

        wanted = results(plain, x, [module.weight, *ws])
        assert_bits(results(fused, x, [weight, *ws]), wanted)


def both(n: Tensor, *ws: Tensor) -> Tensor:
    """An MLP and a third linear of one norm, whose gradients are summed."""
    return unfused(n, *ws)[..., :64] + F.linear(n, ws[0])[..., :64]
