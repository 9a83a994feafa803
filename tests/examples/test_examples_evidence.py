"""The queue of evidence runs: what is left, what a result counts for, and the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import Load

pytest.importorskip("matplotlib")
pytest.importorskip("tokenizers")


def test_only_runs_without_a_result_are_made(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evidence = load("evidence")
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    names = [run.name for run in evidence.queue()]
    assert len(set(names)) == len(names)
    evidence.add_result(tmp_path, names[0], {"seed": 0, "loss": [3.0] * 30, "norm": [1.0] * 30})
    evidence.main(["list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:4] for line in lines] == ["done", *["    "] * (len(names) - 1)]
    made: list[str] = []
    monkeypatch.setattr(evidence, "make", lambda runs, *_: made.extend(run.name for run in runs))
    evidence.main(["make", "data"])
    assert made == names[1:]
    made.clear()
    evidence.main(["make", "data", "--runs", names[5], names[0], names[2]])
    assert made == [names[5], names[2]]
    with pytest.raises(SystemExit, match=r"no run 'x'.*list"):
        evidence.main(["make", "data", "--group", "320m", "--runs", "x"])


def test_the_page_is_rebuilt_from_the_files(load: Load, tmp_path: Path) -> None:
    """Also its earlier runs, of ``long_run_report``, and every figure."""
    out = tmp_path / "docs" / "evidence.md"
    load("evidence").main(["report", "--out", str(out)])
    assert out.read_text() == (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()
    names = ("differences", "120m", "320m", "1100m", "experts", "time", "dense", "moe")
    drawn = {path.name: path.read_bytes() for path in (out.parent / "plots").iterdir()}
    assert drawn.keys() == {f"evidence_{name}.svg" for name in names}
    assert all(b"</svg>" in figure for figure in drawn.values())
