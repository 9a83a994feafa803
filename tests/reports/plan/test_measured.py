"""Predicted memory and time against all measured runs of benchmarks/results that plan covers."""

from __future__ import annotations

import pytest

from tests.support.measured_runs import BEGIN, END, MIB, PAGE, Measured, measured_runs, table

pytest.importorskip("transformers")

RUNS = measured_runs()
PEAK, STEP = 0.06, 0.08
"""The largest relative errors, which the guide names."""


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.file}: {run.variant}")
def test_a_measured_run(run: Measured) -> None:
    memory, ms = run.predicted()
    if run.peak_mib is not None:
        assert memory.total / MIB == pytest.approx(run.peak_mib, rel=PEAK), memory
    if run.ms is not None:
        assert ms == pytest.approx(run.ms, rel=STEP)


def test_no_file_lost_its_rows() -> None:
    peaks = [run for run in RUNS if run.peak_mib is not None]
    times = [run for run in RUNS if run.ms is not None]
    assert len(peaks) >= 148
    assert len(times) >= 106
    assert {run.settings["card"] for run in times} == {"H100", "H200"}
    assert f"{len(peaks)} peaks and {len(times)} times" in PAGE.read_text("utf-8")


def test_the_guide_shows_the_comparison_of_today() -> None:
    """``python -m tests.support.measured_runs`` writes it again."""
    shown = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    assert shown.strip() == table().strip()
