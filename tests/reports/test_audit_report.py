"""Tables and totals of audits, and the notes on weight gradients by ``Recipe(wgrad_input=...)``."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Weight, Recipe, audit, audit_step, convert
from blocktensor.reports import AuditReport
from blocktensor.reports.audit_report import AuditedProduct
from tests.support.models import randn


def entry(module: str, flops: int, precision: str = "bf16", **others: object) -> AuditedProduct:
    return AuditedProduct(module, "forward", 1, 2, 3, 4, precision, flops, **others)  # type: ignore[arg-type]


def test_totals_name_the_largest_groups() -> None:
    modules = [entry(f"{letter}.{i}", 10 * n) for n, letter in enumerate("abcdefg") for i in (0, 1)]
    report = AuditReport((*modules, entry("h", 30, "fp32"), entry("h", 560, "FP8")), ("a note",))
    assert_expected_inline(
        "\n".join(str(report).splitlines()[-2:]),
        """\
FP8: 55.4% of FLOPs; bf16: g.* 11.9%, f.* 9.9%, e.* 7.9%, d.* 5.9%, 3 others; fp32: h 3.0%
a note""",
    )
    assert list(report.by_precision()) == ["FP8", "bf16", "fp32"]
    assert sum(report.by_precision().values()) == pytest.approx(1)


def test_layers_alike_are_one_line_with_the_share_of_all() -> None:
    entries = (
        entry("blocks.0.up", 10),
        entry("blocks.1.up", 10),
        entry("blocks.1.up", 10, recomputed=True),
        entry("blocks.0.attn", 20, attention=True),
        entry("blocks.1.attn", 20, attention=True),
        entry("blocks.0.up", 30, reason="reads a view of blocks.0.w"),
    )
    report = AuditReport(entries)
    assert_expected_inline(
        str(report),
        """\
module             product              M x N x K  precision  FLOPs  should be FP8
-----------------  -------------------  ---------  ---------  -----  --------------------------
blocks.*.up (2)    forward              2 x 3 x 4  bf16       20.0%
blocks.1.up        forward, recomputed  2 x 3 x 4  bf16       10.0%
blocks.0.up        forward              2 x 3 x 4  bf16       30.0%  reads a view of blocks.*.w
blocks.*.attn (2)  attention forward    2 x 3 x 4  bf16       40.0%
FP8: 0.0% of FLOPs; bf16: blocks.*.up 60.0%, attention scores 40.0%
should have been FP8 and was not: 30.0% of FLOPs""",
    )
    assert report.marked == entries[-1:]


def test_products_without_flops() -> None:
    assert_expected_inline(
        str(AuditReport((entry("a", 0),))),
        """\
module  product  M x N x K  precision  FLOPs
------  -------  ---------  ---------  -----
a       forward  2 x 3 x 4  bf16       0.0%
FP8: 0.0% of FLOPs; bf16: a 0.0%""",
    )


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
