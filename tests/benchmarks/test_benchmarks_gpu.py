"""Every benchmark runs through on a GPU, on its smallest shapes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import cast, experts, gemm, grouped, linear, lora, popular

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


@pytest.mark.unchecked
def test_cast() -> None:
    rows = list(cast.measure(**cast.QUICK))
    assert len(rows) == 21
    # of a copy that other processes may slow down
    assert all(0.01 < share < 10 for share in numbers(rows, "share_of_copy"))


def test_linear() -> None:
    (row,) = linear.measure(**linear.QUICK)
    assert all(math.isfinite(v) and v > 0 for v in row.values() if isinstance(v, float))
    assert row["graph_fp8_ms"] <= row["eager_fp8_ms"] * 1.2
    assert 0.5 < row["over_parts"] < 2


def test_grouped() -> None:
    rows = list(grouped.measure(**grouped.QUICK))
    assert len(rows) == 10
    for row in rows:
        limit = 5000 if row["unit"] == "GB/s" else 2500
        assert all(50 < row[name] < limit for name in ("blocktensor", "dense")), row
        assert ("bf16" in row) == (row["kind"] not in ("cast", "square_cast"))


@pytest.mark.unchecked
def test_experts() -> None:
    rows = list(experts.measure(**experts.QUICK))
    assert len(rows) in (6, 12), "those of models need transformers"
    for row in rows:
        assert 0.1 < row["speedup"] < 3
        assert 0.1 < row["peak_of_bf16"] < 3
    layers = [row for row in rows if row["what"] == "layer"]
    for row in layers:
        assert row["gemms_us"] > 0
        assert row["elementwise_us"] > 0
        ours = ("activation_casts_us", "weight_casts_us")
        assert all((row[kind] > 0) == (row["variant"] != "bf16") for kind in ours)
        # elsewhere one launch makes both forms
        assert (row["weight_transposes_us"] > 0) == ("cache_weight=False" in row["variant"])


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore:no weight of this .* is in FP8")
def test_popular() -> None:
    pytest.importorskip("transformers")
    rows = list(popular.measure(**popular.QUICK))
    assert [row["variant"] for row in rows] == list(popular.VARIANTS)
    assert all(0.2 < x < 5 for x in numbers(rows, "eager_speedup", "graphs_speedup"))


@pytest.mark.unchecked
def test_lora() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    rows = list(lora.measure(**lora.QUICK))
    assert [f"{row['variant']}, {row['adapters']}" for row in rows] == list(lora.VARIANTS)
    assert all(0.2 < x < 5 for x in numbers(rows, "eager_speedup", "compiled_speedup"))
