"""What torch ops do on the two FP8 types: exactly FP8, or a loud refusal; never in between."""

from __future__ import annotations

import torch

from tests.support.models import (
    both_kinds,
    composed,
    randn,
)


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
