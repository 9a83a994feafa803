"""Calls of backward for FP8 weights: checkpointed forwards run in FP8, results are torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, quantize
from tests.support.models import FP32_SCALES, Trace, complaint, randn

N, K = 256, 192


def weight(seed: int = 0) -> nn.Parameter:
    return nn.Parameter(BlockwiseFP8Weight(randn(N, K, seed=seed), FP32_SCALES))


def run(x: Tensor, w: Tensor, checkpointed: bool) -> Tensor:
    def linear(x: Tensor) -> Tensor:
        return F.linear(x, w).relu()

    y: Tensor = checkpoint(linear, x, use_reentrant=False) if checkpointed else linear(x)
    return y.sum()


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_grad(kind: Any) -> None:
    x, w = randn(8, K, grad=True), weight()
    if kind is dict and torch.__version__ < (2, 13):
        pytest.skip("torch.autograd.grad takes no dictionary before torch 2.13")
    wanted = torch.autograd.grad(run(x, w, False), (x, w))
    inputs = {"x": x, "w": w} if kind is dict else kind((x, w))
    with Trace() as trace:
        got = torch.autograd.grad(run(x, w, True), inputs)
    assert trace.count("blocktensor.gemm") == 4  # two of forwards
    got = got.values() if isinstance(got, dict) else got
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    (alone,) = torch.autograd.grad(run(x, w, True), w)
    assert torch.equal(alone, wanted[1])


def test_backward() -> None:
    x, w = randn(8, K, grad=True), weight()
    (wanted,) = torch.autograd.grad(run(x, w, False), w)
    for i in range(1, 3):
        run(x, w, True).backward(inputs=[w])
        assert torch.equal(w.grad, wanted * i)
    torch.autograd.backward([run(x, w, True)], inputs=w)
    assert torch.equal(w.grad, wanted * 3)
    assert x.grad is None


def test_what_is_not_used() -> None:
    x, w, other = randn(8, K, grad=True), weight(), weight(1)
    y = run(x, w, False)
    assert torch.autograd.grad(y, other, allow_unused=True, retain_graph=True) == (None,)
    (zeros,) = torch.autograd.grad(y, other, materialize_grads=True, retain_graph=True)
    assert zeros.shape == other.shape and not zeros.any()
    assert "have been used in the graph" in complaint(
        RuntimeError, lambda: torch.autograd.grad(y, other, retain_graph=True)
    )
    frozen = weight().requires_grad_(False)
    assert "require grad" in complaint(RuntimeError, lambda: torch.autograd.grad(y, frozen))


def test_fp8_outputs_and_inputs_in_between() -> None:
    x, w = randn(8, K, grad=True), weight()
    y = quantize(x * 2, FP32_SCALES)
    assert isinstance(y, BlockwiseFP8Tensor)
    grad = randn(8, K, seed=4)
    assert torch.equal(torch.autograd.grad(y, x, grad, retain_graph=True)[0], grad * 2)
    z = F.linear(y, w).sum()
    of_y, of_x = torch.autograd.grad(z, (y, x))
    assert torch.equal(of_x, of_y * 2)
