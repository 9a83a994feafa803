"""What of the benchmarks runs without a GPU: the command line, results on disk, and bars."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import check, host, results
from benchmarks.check import Bar
from benchmarks.results import Row


@pytest.mark.parametrize("peers", [{}, {"torchao": "0.18.0"}], ids=str)
def test_results_carry_what_reproduces_them(
    peers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions, also of a library that was compared. A run that is killed leaves its rows."""
    installed = [SimpleNamespace(name=k, version=v) for k, v in ({"torch": "2"} | peers).items()]
    monkeypatch.setattr(results.importlib.metadata, "distributions", lambda: installed)
    rows: list[Row] = [{"op": "rowwise", "us": 1.5}]
    path = results.write("cast", rows, tmp_path, partial=True)
    assert json.loads(path.read_text())["rows"] == rows
    assert results.load("cast", tmp_path) is None
    assert results.write("cast", 2 * rows, tmp_path, copy_gb_s=4000) == tmp_path / "cast.json"
    assert [file.name for file in tmp_path.iterdir()] == ["cast.json"]
    content = json.loads((tmp_path / "cast.json").read_text())
    assert content["rows"] == 2 * rows
    assert content["copy_gb_s"] == 4000
    wanted = {"device", "torch", "cuda", "triton", "python", "date", "command", "backward"}
    assert set(content["environment"]) == wanted | peers.keys()
    assert content["environment"].items() >= peers.items()
    assert content["environment"]["command"] == "python -m benchmarks cast"
    assert content["environment"]["backward"] == "in autograd's threads"
    with torch.autograd.set_multithreading_enabled(False):
        assert results.environment("cast")["backward"] == "in the calling thread"
    assert results.load("cast", tmp_path) == content
    assert results.load("gemm", tmp_path) is None


@pytest.mark.parametrize("name", ["gemm", "linear", "all"])
def test_without_a_gpu_a_measurement_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main([name]) == 2
    assert capsys.readouterr().err == "benchmarks need a CUDA GPU: none found\n"


REASON = "ModuleNotFoundError: No module named [deep_gemm]"
ROWS: list[Row] = [{"shape": 1, "fast": 2.5}, {"shape": 2, "slow": None}]


@pytest.mark.parametrize("quick", [False, True])
def test_a_run_writes_its_rows_and_names_absent_peers(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    calls: list[dict[str, Any]] = []

    def measure(**arguments: Any) -> Iterator[Row]:
        calls.append(arguments)
        yield from ROWS

    fake = SimpleNamespace(
        measure=measure, QUICK={"rounds": 3}, facts=lambda: {"absent": {"deepgemm": REASON}}
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "fake")
    monkeypatch.setattr(results, "environment", lambda name: {"device": "fake"})
    monkeypatch.setattr(cli, "BENCHMARKS", {"fake": fake})
    monkeypatch.setattr(results, "FOLDER", tmp_path / "kept")
    assert cli.main(["fake", *(["--quick"] if quick else [])]) == 0
    assert calls == [{"rounds": 3} if quick else {}]
    content = results.load("fake", results.SMOKE_FOLDER if quick else tmp_path / "kept")
    assert content is not None and content["rows"] == ROWS
    shown = capsys.readouterr().out
    assert f"absent: deepgemm ({REASON})" in shown
    assert "2.5" in shown and "slow" not in shown, "a column without a number is not shown"


def test_host_time_is_a_median_with_the_gpu_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits, slow = [0.0], [0], iter([5e-3] * 5 + [1e-3] + [2e-6] * 2 + [9e-3])

    def call() -> None:
        assert waits[0] in (0, 1)
        waits[0] = 0
        now[0] += next(slow)

    monkeypatch.setattr("torch.cuda.synchronize", lambda: waits.__setitem__(0, 1))
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert host.host_us(call, calls=3) == pytest.approx(2)


BAR = Bar("id", "text", "gemm", "ours", "geometric mean", 2, over="cublas", at_least=1.1)
RATES: list[Row] = [
    {"kind": "fprop", "m": 1, "ours": 120, "cublas": 100},
    {"kind": "fprop", "m": 2, "ours": 150, "cublas": 120},
    {"kind": "wgrad", "m": 1, "ours": 90, "cublas": 100},
]


@pytest.mark.parametrize(("values", "mean"), [([2.0, 8.0], 4), ([0.5, 2.0], 1), ([3.0], 3)])
def test_geometric_mean(values: list[float], mean: float) -> None:
    assert results.geometric_mean(values) == pytest.approx(mean, rel=1e-12)


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
    assert results.select(RATES, where) == [RATES[i] for i in found]


def test_ratios_leave_out_rows_without_the_columns() -> None:
    rows = [*RATES, {"ours": 5}, {"ours": None, "cublas": 1}, {"ours": 5, "cublas": None}]
    assert results.ratios(rows, "ours", "cublas") == [1.2, 1.25, 0.9]
    assert results.ratios(rows, "ours") == [120, 150, 90, 5, 5]


FPROP, ONE = {"where": {"kind": "fprop"}}, {"where": {"kind": "fprop", "m": 1}, "rows": 1}
MEAN = math.sqrt(1.2 * 1.25)
DECLINED = [RATES[0], {**RATES[1], "cublas": None}]
NOBODY = "no row has ours and draft"


@pytest.mark.parametrize(
    ("change", "rows", "measured", "holds", "note"),
    [
        (FPROP, RATES, MEAN, True, ""),
        ({**FPROP, "reduce": "minimum"}, RATES, 1.2, True, ""),
        ({**FPROP, "reduce": "maximum"}, RATES, 1.25, True, ""),
        ({**ONE, "at_least": 1.2}, RATES, 1.2, True, ""),
        ({**ONE, "at_least": 1.2001}, RATES, 1.2, False, ""),
        ({**ONE, "at_least": None, "at_most": 1.2}, RATES, 1.2, True, ""),
        ({**ONE, "at_least": None, "at_most": 1.1999}, RATES, 1.2, False, ""),
        ({**FPROP, "rows": 13}, RATES, MEAN, False, "2 of 13 rows measured"),
        ({}, DECLINED, 1.2, True, "1 of 2 rows lack cublas"),
        ({"over": "draft"}, RATES, None, False, NOBODY),
        ({"over": "draft", "optional": True}, RATES, None, None, NOBODY),
    ],
)
def test_judge(change: Any, rows: Any, measured: float | None, holds: Any, note: str) -> None:
    verdict = check.judge(replace(BAR, **change), rows)
    assert verdict.measured == (measured and pytest.approx(measured, rel=1e-12))
    assert (verdict.holds, verdict.note) == (holds, note)
    assert check.passed([verdict]) is (holds is not False)


@pytest.mark.parametrize("change", [{"at_least": None}, {"at_most": 2.0}, {"reduce": "mean"}])
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


def test_the_results_hold_all_bars() -> None:
    assert check.passed(check.verdicts(check.load_bars()))


@pytest.mark.parametrize("bar", check.load_bars(), ids=lambda bar: bar.id)
def test_every_bar_of_the_project_can_fail(bar: Bar) -> None:
    rows = results.select(passing(bar.result, [bar]), bar.where)
    if bar.optional:
        absent = bar.over or bar.value
        assert check.judge(bar, [{**row, absent: None} for row in rows]).holds is None
        limit = bar.at_least or 1.0
        if bar.over:
            rows = [{**row, bar.over: row[bar.value] / limit / 1.01} for row in rows]
        else:
            rows = [{bar.value: (bar.at_most or 4.0) / 2, **row} for row in rows]
    rows = [row for row in rows if row.get(bar.value) is not None]
    assert check.judge(bar, rows).holds
    assert check.judge(bar, rows[len(rows) - bar.rows + 1 :]).holds is not True
    worse = 0.1 if bar.at_least is not None else 500.0
    bad = [{**row, bar.value: row[bar.value] * worse} for row in rows]
    assert check.judge(bar, bad).holds is False


def test_check_shows_what_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    bars = check.load_bars()
    for name in {bar.result for bar in bars}:
        rows = passing(name, [bar for bar in bars if bar.result == name])
        results.write(name, rows, tmp_path)
    assert cli.main(["check", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("every bar holds\n")
    (tmp_path / "linear.json").unlink()
    assert cli.main(["check", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    failing = sum(bar.result == "linear" for bar in bars)
    assert f"{failing} of {len(bars)} bars do not hold" in shown
    assert "linear.json is missing" in shown
