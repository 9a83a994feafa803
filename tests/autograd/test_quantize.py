"""The differentiable cast of an activation that several linears share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import blocktensor
from blocktensor import BlockwiseFP8Tensor, functional
from tests.support.models import linear, randn


def test_a_shared_activation_gives_the_same_bits_and_sums_gradients(device: torch.device) -> None:
    gate, up = linear(256, 384, device=device), linear(128, 384, bias=True, device=device)
    x = randn(2, 5, 384, device=device)
    grads = randn(2, 5, 256, seed=3, device=device), randn(2, 5, 128, seed=4, device=device)

    def run(share: bool) -> list[Tensor]:
        gate.zero_grad(), up.zero_grad()
        leaf = x.clone().requires_grad_()
        inside = blocktensor.quantize(leaf) if share else leaf
        outputs = gate(inside), up(inside)
        torch.autograd.backward(outputs, grads)
        return [*outputs, leaf.grad, gate.weight.grad, up.weight.grad, up.bias.grad]

    for shared, apart in zip(run(share=True), run(share=False), strict=True):
        assert torch.equal(shared, apart)


def test_a_shared_activation_is_cast_and_saved_once() -> None:
    gate, up = linear(256, 384), linear(128, 384)
    x, saved = randn(5, 384, grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        shared = blocktensor.quantize(x)
        gate(shared), up(shared)
    data = [t for t in saved if t.dtype == torch.float8_e4m3fn]
    assert len(data) == 2
    assert data[0].data_ptr() == data[1].data_ptr() == shared.columnwise_data.data_ptr()


@pytest.mark.parametrize("shape", [(7,), (3, 200), (2, 3, 200), (0, 200)])
def test_quantize_is_straight_through(shape: tuple[int, ...]) -> None:
    x, w = randn(*shape, grad=True), randn(130, shape[-1], seed=1)
    shared = blocktensor.quantize(x)
    assert type(shared) is BlockwiseFP8Tensor
    assert (shared.shape, shared.dtype, shared.requires_grad) == (x.shape, x.dtype, True)
    y = functional.linear(shared, w)
    grad = randn(*y.shape, seed=3)
    (direct,) = torch.autograd.grad(functional.linear(x, w), x, grad)
    y.backward(grad)
    assert torch.equal(x.grad, direct)
    assert blocktensor.quantize(shared) is shared


def test_quantize_of_what_needs_no_grad() -> None:
    assert not blocktensor.quantize(randn(5, 200)).requires_grad
    with torch.no_grad():
        assert not blocktensor.quantize(randn(5, 200, grad=True)).requires_grad


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
    q = blocktensor.quantize(x)
    taken = PARTS[part](q)
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
