"""Every benchmark runs through on a GPU, on its smallest shapes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import cast, gemm, linear

pytestmark = pytest.mark.gpu


def numbers(rows: list[dict[str, Any]], *columns: str) -> list[float]:
    return [row[column] for row in rows for column in columns]


def test_gemm() -> None:
    rows = list(gemm.measure(**gemm.QUICK))
    assert [row["kind"] for row in rows] == list(gemm.KINDS)
    rates = numbers(rows, "blocktensor", "triton", "tensorwise")
    assert all(50 < rate < 2500 for rate in rates), "TFLOP/s of an FP8 GPU"
    for row in rows:
        assert row["backend"] in row
        assert row["of_limit"] == pytest.approx(row["blocktensor"] / row["tensorwise"], abs=2e-3)


def test_cast() -> None:
    rows = list(cast.measure(**cast.QUICK))
    assert len(rows) == cast.total(**cast.QUICK)
    assert all(0.02 < share < 1.3 for share in numbers(rows, "share_of_copy"))


def test_linear() -> None:
    (row,) = linear.measure(**linear.QUICK)
    assert all(math.isfinite(v) and v > 0 for v in row.values() if isinstance(v, float))
    assert row["graph_fp8_ms"] <= row["eager_fp8_ms"] * 1.2
    assert 0.5 < row["over_parts"] < 2
