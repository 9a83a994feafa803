"""Products of the FP8 types below autograd: in FP8, or refused."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import POWER_OF_TWO, SQUARE, both_kinds, composed, quantized, randn


def test_below_autograd_products_are_fp8_too() -> None:
    """Callers that arrive there (DTensor's local ops) with plain or FP8 operands."""
    x, values, bias = randn(5, 384), randn(256, 384, seed=1), randn(256, seed=4)
    wanted = composed(x, values, randn(5, 256), bias=bias)[0]
    bare = composed(x, values, randn(5, 256))[0]
    for w in both_kinds(values).values():
        with torch.no_grad():
            assert torch.equal(torch.ops.aten.mm(x, w.t()), bare)
            assert torch.equal(torch.ops.aten.addmm(bias, x, w.t()), wanted)
            assert torch.equal(torch.ops.aten.mm(w, x.t()).t(), bare)
            scaled = torch.ops.aten.addmm(bias, x, w.t(), alpha=2, beta=3)
            torch.testing.assert_close(scaled, 2 * bare + 3 * bias, rtol=0.02, atol=0.05)


def test_operands_that_do_not_fit_are_refused() -> None:
    x, w = quantized(5, 384), quantized(256, 384, block=SQUARE)
    for a, b, message in (
        (x, w, r"cannot multiply \[5, 384\] by \[256, 384\]: the inner sizes 384 and 256 differ"),
        (x, quantized(2, 384, 256, block=SQUARE), "right operand has 3 dimensions"),
        (x, quantized(256, 384, block=SQUARE, recipe=POWER_OF_TWO).t(), "mixed recipes"),
        (quantized(5, 384, rowwise=False), w.t(), "without its rowwise form"),
    ):
        with pytest.raises(ValueError, match=message):
            torch.ops.aten.mm(a, b)
