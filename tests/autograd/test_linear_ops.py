"""The ops that a linear runs: casts and products in FP8, and no more of them than needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from blocktensor import Recipe
from tests.support.models import Trace, linear, randn
from tests.support.steps import assert_trace
from tests.support.wgrad_inputs import HIGH, SQUARES

OF_WEIGHT, PRODUCT = "quantize_with_transpose 128x128", "gemm 1x128 128x128"
OPS: dict[str, tuple[Recipe, list[str], list[str]]] = {
    "1x128": (
        Recipe(),
        [OF_WEIGHT, "quantize_both 1x128", PRODUCT],
        ["quantize_both 1x128", PRODUCT, "gemm 1x128 1x128"],
    ),
    "128x128": (
        SQUARES,
        [OF_WEIGHT, "quantize_both 1x128 128x128", PRODUCT],
        ["quantize_both 1x128", PRODUCT, "gemm 1x128 128x128"],
    ),
    "high_precision": (
        HIGH,
        [OF_WEIGHT, "quantize_rowwise 1x128", PRODUCT],
        ["quantize_rowwise 1x128", PRODUCT],  # and aten.mm
    ),
}
"""Of each ``wgrad_input``: the recipe, the ops of forward and of backward."""


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 384), (2, 5, 384)])
@pytest.mark.parametrize("wgrad_input", OPS)
def test_a_forward_and_a_backward(wgrad_input: str, shape: tuple[int, ...], bias: bool) -> None:
    recipe, forward, backward = OPS[wgrad_input]
    module = linear(256, 384, recipe=recipe, bias=bias)
    assert_trace(module, randn(*shape), forward=forward, backward=backward)
    others = {"aten.mm": int(recipe is HIGH), "aten.sum": int(bias)}
    assert_trace(module, randn(*shape), backward=others)


def test_a_second_microbatch_casts_no_weight() -> None:
    """If the recipe says so."""
    module, x = linear(256, 384, recipe=Recipe(cache_weight="step")), randn(5, 384, grad=True)
    module(x)
    assert_trace(module, x, forward=["quantize_both 1x128", PRODUCT], backward={})


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_without_gradients_x_is_cast_rowwise_only(mode: Callable[[], Any]) -> None:
    module, x = linear(256, 384, frozen=True), randn(5, 384)
    with mode():
        assert_trace(module, x, forward=["quantize_rowwise 1x128", PRODUCT])


@pytest.mark.parametrize(
    ("x_grad", "w_grad", "cast", "gemms"),
    [
        (True, True, "blocktensor.quantize_both", 2),
        (True, False, "blocktensor.quantize_rowwise", 1),
        (False, True, "blocktensor.quantize_columnwise", 1),
        (False, False, "blocktensor.quantize", 0),
    ],
)
def test_backward_runs_only_what_is_asked_for(
    x_grad: bool, w_grad: bool, cast: str, gemms: int
) -> None:
    module = linear(256, 384, bias=True)
    module.weight.requires_grad_(w_grad)
    x = randn(5, 384, grad=x_grad)
    with Trace() as trace:
        y = module(x)
    of_weight = "quantize_with_transpose" if x_grad else "quantize_rowwise"
    assert trace.count("128x128") == 2  # the cast of the weight and the product
    assert trace.ops.count(f"blocktensor.{of_weight} 128x128") == 1
    inputs = [t for t in (x, *module.parameters()) if t.requires_grad]
    with Trace() as trace:
        torch.autograd.grad(y, inputs, randn(5, 256, seed=3))
    assert trace.count("blocktensor.quantize") == trace.count(cast) == (gemms > 0)
    assert trace.count("blocktensor.gemm") == trace.count("mm") == gemms
    assert trace.count("transpose") == 0
