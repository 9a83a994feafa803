"""The ops that a linear runs: casts and products in FP8, and no more of them than needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from blocktensor import Recipe
from tests.support.models import Trace, linear, randn


def traced(run: Callable[[], Any]) -> str:
    with Trace() as trace:
        run()
    return "\n".join(trace.ops)


def test_trace_of_a_forward_and_a_backward() -> None:
    module, x, grad = linear(256, 384), randn(5, 384, grad=True), randn(5, 256, seed=3)
    y: list[Tensor] = []
    assert_expected_inline(
        traced(lambda: y.append(module(x))),
        """\
blocktensor.quantize_with_transpose 128x128
blocktensor.quantize_both 1x128
blocktensor.gemm 1x128 128x128""",
    )
    assert_expected_inline(
        traced(lambda: y[0].backward(grad)),
        """\
blocktensor.quantize_both 1x128
blocktensor.gemm 1x128 128x128
blocktensor.gemm 1x128 1x128""",
    )


def test_trace_with_bias_and_batch() -> None:
    module, x = linear(256, 384, bias=True), randn(2, 5, 384, grad=True)
    grad, y = randn(2, 5, 256, seed=3), []
    assert_expected_inline(
        traced(lambda: y.append(module(x))),
        """\
blocktensor.quantize_with_transpose 128x128
blocktensor.quantize_both 1x128
blocktensor.gemm 1x128 128x128""",
    )
    assert_expected_inline(
        traced(lambda: y[0].backward(grad)),
        """\
aten.sum.dim_IntList
aten._to_copy
blocktensor.quantize_both 1x128
blocktensor.gemm 1x128 128x128
blocktensor.gemm 1x128 1x128""",
    )


def test_trace_of_a_second_microbatch_casts_no_weight() -> None:
    """If the recipe says so."""
    step = Recipe(cache_weight="step")
    module, x = linear(256, 384, recipe=step), randn(5, 384, grad=True)
    module(x)
    assert_expected_inline(
        traced(lambda: module(x)),
        """\
blocktensor.quantize_both 1x128
blocktensor.gemm 1x128 128x128""",
    )


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_trace_without_gradients_casts_x_rowwise_only(mode: Callable[[], Any]) -> None:
    module, x = linear(256, 384, frozen=True), randn(5, 384)
    module(x)
    with mode():
        assert_expected_inline(
            traced(lambda: module(x)),
            """\
blocktensor.quantize_rowwise 1x128
blocktensor.gemm 1x128 128x128""",
        )


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
