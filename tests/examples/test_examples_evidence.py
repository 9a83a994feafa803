"""The queue of evidence runs: what is left, what a result counts for, and the page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from tests.support.scripts import Load

pytest.importorskip("matplotlib")
pytest.importorskip("tokenizers")


def result(heldout: float, **facts: Any) -> dict[str, Any]:
    losses = [3.0, 2.0] * 200
    return {"heldout": [[400, heldout]], "loss": losses, "norm": [1.0] * 400, **facts}


def test_differences_are_paired_by_seed(load: Load) -> None:
    report = load("evidence_report")
    results = {f"120m_bf16_{seed}": result(2.0 + seed) for seed in range(4)}
    results |= {f"120m_fp8_{seed}": result((2.0 + seed) * 1.01) for seed in (0, 1)}
    results |= {"120m_fp8_3": result(5.0), "120m_fp8_7": result(9.0), "320m_fp8_0": result(2.0)}
    (found,) = report.differences(results, "120m", ("bf16", "fp8", "fp8_128x128"))
    assert found.by_seed == pytest.approx({0: 1.0, 1: 1.0, 3: 0.0})
    assert found.mean == pytest.approx(2 / 3)
    spread = stdev([1.0, 1.0, 0.0])
    assert found.half_width == pytest.approx(4.303 * spread / math.sqrt(3))
    assert report.differences(results, "320m", ("fp8",)) == []  # no bf16 of that model


def test_the_spread_of_runs(load: Load) -> None:
    one, other = result(2.0), result(2.02)
    other["loss"] = [3.3, 2.2] * 200
    other["norm"] = [9.0] * 100 + [1.0] * 299 + [4.0]  # the first hundred do not count
    last, parted, largest = load("evidence_report").spread([one, other])
    assert (last, parted, largest) == pytest.approx((1.0, 10.0, 4.0))


def test_only_runs_without_a_result_are_made(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evidence = load("evidence")
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    names = [run.name for run in evidence.queue()]
    assert len(set(names)) == len(names)
    (tmp_path / f"{names[0]}.json").write_text(json.dumps(result(2.0)))
    evidence.main(["list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:4] for line in lines] == ["done", *["    "] * (len(names) - 1)]
    made: list[str] = []
    monkeypatch.setattr(evidence, "make", lambda runs, *_: made.extend(run.name for run in runs))
    evidence.main(["make", "data"])
    assert made == names[1:]


def test_the_page_is_rebuilt_from_the_files(load: Load, tmp_path: Path) -> None:
    out = tmp_path / "docs" / "evidence.md"
    load("evidence").main(["report", "--out", str(out)])
    page = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()
    assert out.read_text() == page
    drawn = {path.name for path in (out.parent / "plots").iterdir()}
    assert {"evidence_differences.png", "evidence_120m.png"} <= drawn
