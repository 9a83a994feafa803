"""Gradients in batches: refused, and nothing else with them."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from blocktensor import functional
from tests.support.linear_ways import grads_of, way_of_linears
from tests.support.models import complaint, linear, randn

__all__ = ["way_of_linears"]


def test_batched_gradients_are_refused_and_only_they() -> None:
    module, x = linear(256, 384), randn(5, 384, grad=True)
    grads = torch.stack([randn(5, 256, seed=seed) for seed in range(3)])
    y = module(x)
    assert_expected_inline(
        complaint(
            NotImplementedError,
            lambda: torch.autograd.grad(y, x, grads, retain_graph=True, is_grads_batched=True),
        ),
        """\
torch.autograd.grad(..., is_grads_batched=True) through an FP8 linear, whose casts
take one gradient: call it once for each gradient, with retain_graph=True""",
    )
    for grad in grads:
        (dx,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        assert torch.equal(dx, grads_of(module, x, grad)[1])


def test_of_a_linear_without_a_gradient_of_x() -> None:
    module = linear(256, 384)
    y = module(randn(5, 384))
    grads = torch.stack([randn(5, 256, seed=seed) for seed in range(3)])
    message = complaint(
        NotImplementedError,
        lambda: torch.autograd.grad(y, module.weight, grads, is_grads_batched=True),
    )
    assert "is_grads_batched" in message


def test_of_a_gated_mlp() -> None:
    gate, up, down = linear(256, 128), linear(256, 128), linear(128, 256)
    x = randn(5, 128, grad=True)
    y = functional.gated_mlp(x, gate.weight, up.weight, down.weight)
    grads = torch.stack([randn(5, 128, seed=seed) for seed in range(3)])
    message = complaint(
        NotImplementedError,
        lambda: torch.autograd.grad(y, x, grads, is_grads_batched=True),
    )
    assert "is_grads_batched" in message
