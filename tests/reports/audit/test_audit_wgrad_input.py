"""What an audit says of weight gradients that ``Recipe(wgrad_input=...)`` asks for."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Weight, Recipe, audit, audit_step, convert
from tests.support.models import randn


def squarish(wgrad_input: Any) -> nn.Module:
    """Of as many features as tokens, so that dgrad and wgrad have one shape; and a plain linear."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 48, bias=False))
    recipe = Recipe(wgrad_input=wgrad_input)
    convert(model, recipe, skip=["2"], skip_small=False)
    return model


def test_weight_gradients_of_x_in_squares_are_told_from_data_gradients() -> None:
    report = audit(squarish("128x128"), randn(32, 32, dtype=torch.float32, grad=True))
    assert_expected_inline(
        str(report),
        """\
module  product                       M x N x K     precision  FLOPs
------  ----------------------------  ------------  ---------  -----
0       fprop                         32 x 32 x 32  FP8        13.3%
2       forward                       32 x 48 x 32  fp32       20.0%
2       backward                      48 x 32 x 32  fp32       20.0%
2       backward                      32 x 32 x 48  fp32       20.0%
0       dgrad                         32 x 32 x 32  FP8        13.3%
0       wgrad of x in 128x128 blocks  32 x 32 x 32  FP8        13.3%
FP8: 40.0% of FLOPs; fp32: 2 60.0%""",
    )
    assert not report.marked
    notes = {e.kind: e.note for e in report.entries if e.precision == "FP8"}
    assert notes == {"fprop": "", "dgrad": "", "wgrad": "of x in 128x128 blocks"}


def test_weight_gradients_in_high_precision_are_labelled_and_not_marked() -> None:
    model, x = squarish("high_precision"), randn(32, 32, dtype=torch.float32, grad=True)
    report = audit(model, x)
    assert_expected_inline(
        str(report),
        """\
module  product                            M x N x K     precision  FLOPs
------  ---------------------------------  ------------  ---------  -----
0       fprop                              32 x 32 x 32  FP8        13.3%
2       forward                            32 x 48 x 32  fp32       20.0%
2       backward                           48 x 32 x 32  fp32       20.0%
2       backward                           32 x 32 x 48  fp32       20.0%
0       dgrad                              32 x 32 x 32  FP8        13.3%
0       wgrad in high precision by recipe  32 x 32 x 32  fp32       13.3%
FP8: 26.7% of FLOPs; fp32: 2 60.0%, wgrad in high precision by recipe 13.3%""",
    )
    assert not report.marked
    again = audit_step(model, lambda: checkpoint(model, x, use_reentrant=False).sum().backward())
    assert [e.note for e in again.entries if e.note] == ["in high precision by recipe"]


def test_experts_with_weight_gradients_by_recipe() -> None:
    offs = torch.tensor([5, 32], dtype=torch.int32)
    for choice, note in (
        ("1x128", ""),
        ("128x128", "of x in 128x128 blocks"),
        ("high_precision", "in high precision by recipe"),
    ):
        recipe = Recipe(wgrad_input=choice)  # type: ignore[arg-type]
        for kn in (False, True):
            w = nn.Parameter(BlockwiseFP8Weight(randn(2, 32, 32), recipe))
            y = functools.partial(F.grouped_mm, randn(32, 32, grad=True), w if kn else w.mT)
            report = audit_step(nn.Module(), lambda y=y: y(offs=offs).sum().backward())
            kinds = [(e.kind, e.note) for e in report.entries]
            assert kinds == [("fprop", ""), ("dgrad", ""), ("wgrad", note)]
