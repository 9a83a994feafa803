"""torch.autograd.grad of checkpointed forwards, and of FP8 tensors in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, quantize
from tests.support.linear_ways import assert_all_equal
from tests.support.models import FP32_SCALES, Trace, randn

N, K = 256, 192


def weight(seed: int = 0) -> nn.Parameter:
    return nn.Parameter(BlockwiseFP8Weight(randn(N, K, seed=seed), FP32_SCALES))


def loss_of(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).relu().sum()


def checkpointed(x: Tensor, w: Tensor) -> Any:
    return checkpoint(loss_of, x, w, use_reentrant=False)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_grad_of_a_checkpointed_forward(kind: Any) -> None:
    x, w = randn(8, K, grad=True), weight()
    if kind is dict and torch.__version__ < (2, 13):
        pytest.skip("torch.autograd.grad takes no dictionary before torch 2.13")
    wanted = torch.autograd.grad(loss_of(x, w), (x, w))
    inputs = {"x": x, "w": w} if kind is dict else kind((x, w))
    with Trace() as trace:
        got = torch.autograd.grad(checkpointed(x, w), inputs)
    assert trace.count("blocktensor.gemm") == 4  # two of forwards
    assert_all_equal([*(got.values() if isinstance(got, dict) else got)], [*wanted])
    (alone,) = torch.autograd.grad(checkpointed(x, w), w)
    assert torch.equal(alone, wanted[1])


def test_backward_of_a_checkpointed_forward() -> None:
    x, w = randn(8, K, grad=True), weight()
    (wanted,) = torch.autograd.grad(loss_of(x, w), w)
    for i in range(1, 3):
        checkpointed(x, w).backward(inputs=[w])
        assert torch.equal(w.grad, wanted * i)
    torch.autograd.backward([checkpointed(x, w)], inputs=w)
    assert torch.equal(w.grad, wanted * 3)
    assert x.grad is None


def test_what_is_not_used() -> None:
    x, w, other = randn(8, K, grad=True), weight(), weight(1)
    y, frozen = loss_of(x, w), weight().requires_grad_(False)
    assert torch.autograd.grad(y, other, allow_unused=True, retain_graph=True) == (None,)
    (zeros,) = torch.autograd.grad(y, other, materialize_grads=True, retain_graph=True)
    assert zeros.shape == other.shape and not zeros.any()
    with pytest.raises(RuntimeError, match="have been used in the graph"):
        torch.autograd.grad(y, other, retain_graph=True)
    with pytest.raises(RuntimeError, match="require grad"):
        torch.autograd.grad(y, frozen)


def test_fp8_outputs_and_inputs_in_between() -> None:
    x, w = randn(8, K, grad=True), weight()
    y = quantize(x * 2, FP32_SCALES)
    assert isinstance(y, BlockwiseFP8Tensor)
    grad = randn(8, K, seed=4)
    assert torch.equal(torch.autograd.grad(y, x, grad, retain_graph=True)[0], grad * 2)
    of_y, of_x = torch.autograd.grad(F.linear(y, w).sum(), (y, x))
    assert torch.equal(of_x, of_y * 2)
    y, grad = quantize(checkpoint(F.linear, x, w, use_reentrant=False), FP32_SCALES), randn(8, N)
    got = torch.autograd.grad(y, (x, w), grad, retain_graph=True, materialize_grads=True)
    y.backward(grad)
    for found in (got, (x.grad, w.grad)):
        assert_all_equal([*found], [*torch.autograd.grad(F.linear(x, w), (x, w), grad)])
