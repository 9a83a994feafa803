"""What of the benchmarks runs without a GPU: the command line and results on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import __main__ as cli
from benchmarks import host, results
from benchmarks.results import Row


def test_what_a_killed_run_has_measured_is_there(tmp_path: Path) -> None:
    rows = [{"us": 1.5}]
    path = results.write("cast", rows, tmp_path, partial=True)
    assert json.loads(path.read_text())["rows"] == rows
    assert results.load("cast", tmp_path) is None
    assert results.write("cast", 2 * rows, tmp_path) == tmp_path / "cast.json"
    assert [file.name for file in tmp_path.iterdir()] == ["cast.json"]


def test_results_carry_what_reproduces_them(tmp_path: Path) -> None:
    path = results.write("cast", [{"op": "rowwise", "us": 1.5}], tmp_path, copy_gb_s=4000)
    content = json.loads(path.read_text())
    assert content["rows"] == [{"op": "rowwise", "us": 1.5}]
    assert content["copy_gb_s"] == 4000
    wanted = {"device", "torch", "cuda", "triton", "python", "date", "command"}
    assert set(content["environment"]) == wanted
    assert content["environment"]["command"] == "python -m benchmarks cast"
    assert [p.name for p in tmp_path.iterdir()] == ["cast.json"]
    assert results.load("cast", tmp_path) == content
    assert results.load("gemm", tmp_path) is None


@pytest.mark.parametrize("name", ["gemm", "linear", "all"])
def test_without_a_gpu_a_measurement_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main([name]) == 2
    assert capsys.readouterr().err == "benchmarks need a CUDA GPU: none found\n"


def fake_benchmark(calls: list[dict[str, Any]]) -> SimpleNamespace:
    """A benchmark of two rows, which have different columns."""

    def measure(**arguments: Any) -> Iterator[Row]:
        calls.append(arguments)
        yield {"shape": 1, "fast": 2.5}
        yield {"shape": 2, "slow": None}

    return SimpleNamespace(
        measure=measure,
        QUICK={"rounds": 3},
        facts=lambda: {"absent": {"deepgemm": "ModuleNotFoundError: No module named [deep_gemm]"}},
    )


@pytest.mark.parametrize("quick", [False, True])
def test_a_run_writes_its_rows_and_names_absent_peers(
    quick: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("rich")
    calls: list[dict[str, Any]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "fake")
    monkeypatch.setattr(results, "environment", lambda name: {"device": "fake"})
    monkeypatch.setattr(cli, "BENCHMARKS", {"fake": fake_benchmark(calls)})
    monkeypatch.setattr(results, "FOLDER", tmp_path / "kept")
    assert cli.main(["fake", *(["--quick"] if quick else [])]) == 0
    assert calls == [{"rounds": 3} if quick else {}]
    content = results.load("fake", results.SMOKE_FOLDER if quick else tmp_path / "kept")
    assert content is not None
    assert content["rows"] == [{"shape": 1, "fast": 2.5}, {"shape": 2, "slow": None}]
    shown = capsys.readouterr().out
    assert "absent: deepgemm (ModuleNotFoundError: No module named [deep_gemm])" in shown
    assert "2.5" in shown
    assert "slow" not in shown, "a column without a number is not shown"


def test_host_time_is_a_median_with_the_gpu_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits, slow = [0.0], [0], iter([5e-3] * 30 + [1e-3] + [2e-6] * 2 + [9e-3])

    def call() -> None:
        assert waits[0] in (0, 1)
        waits[0] = 0
        now[0] += next(slow)

    monkeypatch.setattr("torch.cuda.synchronize", lambda: waits.__setitem__(0, 1))
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert host.host_us(call, calls=3) == pytest.approx(2)
