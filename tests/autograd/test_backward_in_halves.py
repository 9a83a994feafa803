"""Backwards in two halves, as zero-bubble schedules of torch's pipelining run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import stage

from blocktensor import Recipe
from blocktensor.autograd import pipelining
from tests.support.differentiable import name, samples
from tests.support.linear_ways import HIGH, assert_all_equal, way_of_linears
from tests.support.models import FP32_SCALES, Trace, linear, randn
from tests.support.numeric import assert_same

__all__ = ["name", "way_of_linears"]
in_each_way = pytest.mark.usefixtures("way_of_linears")
needs_halves = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="before 2.13 torch loses an autograd.Function between the halves (pytorch#166577)",
)


@needs_halves
def test_a_split_backward_computes_each_product_once(name: str) -> None:
    run, (x, *weights), products = samples()[name]
    y = run(x, *weights)
    grad = randn(*y.shape, seed=5).to(y.dtype)
    wanted = torch.autograd.grad(y, (x, *weights), grad, retain_graph=True)
    with Trace() as of_input:
        (dx,), groups = stage.stage_backward_input([y], [grad], [x], iter(weights))
    with Trace() as of_weights:
        stage.stage_backward_weight(iter(weights), groups)
    for a, b in zip((dx, *(w.grad for w in weights)), wanted, strict=True):
        assert_same(a, b)
    assert of_input.count("gemm") == products[0]
    of_matrices = sum(w.ndim > 1 + ("experts" in name or "grouped" in name) for w in weights)
    assert of_weights.count("gemm") == (of_matrices if products[0] else 0)


USES: dict[str, Callable[[Tensor, Any, Tensor], Tensor]] = {
    "a linear": F.linear,
    "a view": lambda x, w, bias: x @ w + bias,
    "a linear and a view": lambda x, w, bias: F.linear(x, w, bias) @ w,
    "a linear and a penalty": lambda x, w, bias: (
        F.linear(x, w, bias) + w.high_precision().square().mean()
    ),
    "two linears": lambda x, w, bias: F.linear(torch.tanh(F.linear(x, w)), w, bias),
    "two linears of a copy": lambda x, w, bias: F.linear(
        F.linear(x.float(), w.float()), w.float(), bias.float()
    ),
}


@needs_halves
@in_each_way
@pytest.mark.parametrize("recipe", [FP32_SCALES, HIGH], ids=str)
@pytest.mark.parametrize("use", USES)
def test_gradients_are_those_of_a_whole_backward(use: str, recipe: Recipe) -> None:
    found = []
    for split in (False, True):
        module, x = linear(300, 300, bias=True, recipe=recipe), randn(40, 300, grad=True)
        for step in range(2):
            y = USES[use](x, module.weight, module.bias)
            grad = randn(40, 300, seed=step, dtype=y.dtype)
            if split:
                _, groups = stage.stage_backward_input([y], [grad], [x], module.parameters())
                stage.stage_backward_weight(module.parameters(), groups)
            else:
                y.backward(grad)
        found.append([x.grad, *(p.grad for p in module.parameters())])
    assert_all_equal(*found)


@needs_halves
@pytest.mark.parametrize("in_place", [True, False])
def test_a_gradient_that_changes_between_the_halves_is_read_again(in_place: bool) -> None:
    run, (x, *weights), _ = samples()["gated_mlp"]
    y, grad = run(x, *weights), randn(70, 192, seed=5)
    wanted = torch.autograd.grad(y, weights, 2 * grad, retain_graph=True)
    _, groups = stage.stage_backward_input([y], [grad], [x], iter(weights))
    if in_place:
        grad.mul_(2)
    else:
        groups = [{**group, "grads": [(2 * grad,)]} for group in groups]
    stage.stage_backward_weight(iter(weights), groups)
    assert_all_equal([w.grad for w in weights], [*wanted])


def test_an_input_half_is_watched_once_and_no_longer_than_it_runs() -> None:
    pipelining.watch_halves(), pipelining.watch_halves()
    assert not hasattr(stage.stage_backward_input.__wrapped__, "__wrapped__")

    original = mock.Mock(side_effect=RuntimeError("in the middle"))
    with pytest.raises(RuntimeError, match="in the middle"):
        pipelining._stage_backward_input(original, [])
    assert not pipelining._input_halves
