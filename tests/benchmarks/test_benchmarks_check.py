"""The bars: how rows become one number, and what fails a bar."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as cli
from benchmarks import check, results
from benchmarks.check import Bar
from benchmarks.results import Row

BAR = Bar("id", "text", "gemm", "ours", "geometric mean", 2, over="cublas", at_least=1.1)
ROWS: list[Row] = [
    {"kind": "fprop", "m": 1, "ours": 120, "cublas": 100},
    {"kind": "fprop", "m": 2, "ours": 150, "cublas": 120},
    {"kind": "wgrad", "m": 1, "ours": 90, "cublas": 100},
]


def test_geometric_mean() -> None:
    assert results.geometric_mean([2.0, 8.0]) == pytest.approx(4.0, rel=1e-12)
    assert results.geometric_mean([0.5, 2.0]) == pytest.approx(1.0, rel=1e-12)
    assert results.geometric_mean([3.0]) == pytest.approx(3.0, rel=1e-12)


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [1.0, -2.0]])
def test_a_geometric_mean_needs_positive_numbers(values: list[float]) -> None:
    with pytest.raises(ValueError, match="needs positive numbers"):
        results.geometric_mean(values)


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ({}, [0, 1, 2]),
        ({"kind": "fprop"}, [0, 1]),
        ({"kind": "fprop", "m": 1}, [0]),
        ({"kind": ["fprop", "wgrad"], "m": [1]}, [0, 2]),
        ({"kind": "dgrad"}, []),
        ({"absent": 1}, []),
    ],
)
def test_filters(where: dict[str, Any], found: list[int]) -> None:
    assert results.select(ROWS, where) == [ROWS[i] for i in found]


def test_ratios_leave_out_rows_without_the_columns() -> None:
    rows = [*ROWS, {"ours": 5}, {"ours": None, "cublas": 1}, {"ours": 5, "cublas": None}]
    assert results.ratios(rows, "ours", "cublas") == [1.2, 1.25, 0.9]
    assert results.ratios(rows, "ours") == [120, 150, 90, 5, 5]


@pytest.mark.parametrize(
    ("reduce", "measured"),
    [("geometric mean", math.sqrt(1.2 * 1.25)), ("minimum", 1.2), ("maximum", 1.25)],
)
def test_a_bar_reduces_the_rows_that_match(reduce: str, measured: float) -> None:
    bar = replace(BAR, where={"kind": "fprop"}, reduce=reduce)
    verdict = check.judge(bar, ROWS)
    assert verdict.measured == pytest.approx(measured, rel=1e-12)
    assert (verdict.holds, verdict.note) == (True, "")


@pytest.mark.parametrize(
    ("limits", "holds"),
    [
        ({"at_least": 1.2}, True),
        ({"at_least": 1.2001}, False),
        ({"at_least": None, "at_most": 1.2}, True),
        ({"at_least": None, "at_most": 1.1999}, False),
    ],
)
def test_the_limit_itself_holds(limits: dict[str, float | None], holds: bool) -> None:
    bar = replace(BAR, where={"m": 1, "kind": "fprop"}, rows=1, **limits)  # type: ignore[arg-type]
    assert check.judge(bar, ROWS).holds is holds


def test_too_few_rows_prove_nothing() -> None:
    verdict = check.judge(replace(BAR, where={"kind": "fprop"}, rows=13), ROWS)
    assert verdict.measured is not None and verdict.measured > 1.1
    assert (verdict.holds, verdict.note) == (False, "2 of 13 rows measured")


def test_rows_that_a_peer_declines_are_named() -> None:
    rows = [ROWS[0], {**ROWS[1], "cublas": None}]
    verdict = check.judge(BAR, rows)
    assert verdict.measured == pytest.approx(1.2)
    assert (verdict.holds, verdict.note) == (True, "1 of 2 rows lack cublas")


@pytest.mark.parametrize(("optional", "holds"), [(False, False), (True, None)])
def test_a_column_nobody_measured(optional: bool, holds: bool | None) -> None:
    verdict = check.judge(replace(BAR, over="draft", optional=optional), ROWS)
    assert (verdict.measured, verdict.holds) == (None, holds)
    assert verdict.note == "no row has ours and draft"
    assert check.passed([verdict]) is optional


@pytest.mark.parametrize(
    "change",
    [{"at_least": None}, {"at_most": 2.0}, {"reduce": "mean"}],
)
def test_a_bar_without_a_meaning_is_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="bar 'id'"):
        replace(BAR, **change)


def test_two_bars_of_one_id_are_an_error(tmp_path: Path) -> None:
    entry = {"id": "a", "text": "", "result": "gemm", "value": "x", "reduce": "minimum", "rows": 1}
    path = tmp_path / "thresholds.json"
    path.write_text(json.dumps({"bars": [{**entry, "at_least": 1.0}] * 2}))
    with pytest.raises(ValueError, match="share an id"):
        check.load_bars(path)


def test_a_missing_file_fails_its_bars_and_names_the_command(tmp_path: Path) -> None:
    (verdict,) = check.verdicts([BAR], tmp_path)
    assert (verdict.measured, verdict.holds) == (None, False)
    assert verdict.note == "gemm.json is missing: python -m benchmarks gemm"


def passing(name: str, bars: list[Bar]) -> list[Row]:
    """The rows of a result on disk, with numbers that hold these bars by far."""
    content = results.load(name)
    assert content is not None
    rows = [dict(row) for row in content["rows"]]
    for bar in bars:
        for row in results.select(rows, bar.where):
            over = row.get(bar.over) if bar.over else 1.0
            if over is None or row.get(bar.value) is None:
                continue
            limit = bar.at_most if bar.at_least is None else bar.at_least
            assert limit is not None
            far, best = (limit / 2, min) if bar.at_least is None else (limit * 2, max)
            row[bar.value] = best(row[bar.value], over * far)
    return rows


@pytest.fixture
def good(tmp_path: Path) -> Path:
    bars = check.load_bars()
    for name in {bar.result for bar in bars}:
        rows = passing(name, [bar for bar in bars if bar.result == name])
        results.write(name, rows, tmp_path)
    return tmp_path


def test_every_bar_of_the_project_can_hold(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert cli.main(["check", "--out", str(good)]) == 0
    assert capsys.readouterr().out.endswith("every bar holds\n")


@pytest.mark.parametrize("bar", check.load_bars(), ids=lambda bar: bar.id)
def test_every_bar_of_the_project_can_fail(bar: Bar) -> None:
    rows = results.select(passing(bar.result, [bar]), bar.where)
    if bar.optional:
        assert check.judge(bar, [{**row, bar.over or "": None} for row in rows]).holds is None
        limit = bar.at_least or 1.0
        rows = [{**row, bar.over or "": row[bar.value] / limit / 1.01} for row in rows]
    rows = [row for row in rows if row.get(bar.value) is not None]
    assert check.judge(bar, rows).holds
    assert check.judge(bar, rows[len(rows) - bar.rows + 1 :]).holds is not True
    worse = 0.1 if bar.at_least is not None else 500.0
    bad = [{**row, bar.value: row[bar.value] * worse} for row in rows]
    assert check.judge(bar, bad).holds is False


def test_one_slow_shape_fails_the_worst_shape_only(good: Path) -> None:
    content = results.load("gemm", good)
    assert content is not None
    rows = content["rows"]
    rows[3]["blocktensor"] = rows[3]["cublas"] * 1.06
    results.write("gemm", rows, good)
    failed = [v.bar.id for v in check.verdicts(check.load_bars(), good) if v.holds is False]
    assert failed == ["fprop-cublas-worst"]


def test_check_shows_what_fails(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    (good / "linear.json").unlink()
    assert cli.main(["check", "--out", str(good)]) == 1
    shown = capsys.readouterr().out
    failing = sum(bar.result == "linear" for bar in check.load_bars())
    assert f"{failing} of {len(check.load_bars())} bars do not hold" in shown
    assert "linear.json is missing" in shown
