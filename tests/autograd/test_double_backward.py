"""The second derivative of a linear: refused, and nothing else with it."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from tests.support.linear_ways import grads_of, way_of_linears
from tests.support.models import complaint, linear, randn

__all__ = ["way_of_linears"]


@pytest.mark.parametrize("grad_needs_grad", [False, True])
@pytest.mark.parametrize("of", ["x", "weight"])
def test_second_derivative_is_refused_and_only_that(of: str, grad_needs_grad: bool) -> None:
    module, x = linear(256, 384), randn(5, 384, grad=True)
    grad = randn(5, 256, seed=9, grad=grad_needs_grad)
    plain_grads = grads_of(module, x, grad.detach())
    y = module(x)
    leaf = x if of == "x" else module.weight
    (first,) = torch.autograd.grad(y, leaf, grad, create_graph=True)
    assert torch.equal(first.detach(), plain_grads[1 if of == "x" else 2])
    (y.square().sum() + first.detach().sum()).backward(retain_graph=True)
    penalty = y.sum() + first.square().sum()
    assert_expected_inline(
        complaint(NotImplementedError, penalty.backward),
        """\
the second derivative of a blockwise FP8 linear is not implemented: compute that
part of the model in high precision (convert(..., skip=[...]))""",
    )
