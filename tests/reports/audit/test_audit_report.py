"""Tables and totals of audits."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from blocktensor.reports import AuditReport
from blocktensor.reports.audit.report import AuditedProduct


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
