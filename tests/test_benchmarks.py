"""What of the benchmarks runs without a GPU: the command line, results on disk, the README."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import __main__ as cli
from benchmarks import cast, gemm, host, linear, plots, readme, results, shapes
from benchmarks.results import Row


def test_the_readme_shows_the_results_on_disk() -> None:
    assert readme.render() in readme.README.read_text(), "run: python -m benchmarks readme"


def test_updating_changes_the_section_alone(tmp_path: Path) -> None:
    copy = tmp_path / "README.md"
    copy.write_text(f"above\n{readme.START}\nold\n{readme.END}\nbelow\n")
    assert readme.update(copy)
    assert copy.read_text() == f"above\n{readme.render()}\nbelow\n"
    assert not readme.update(copy)


def test_a_readme_without_marks_is_an_error(tmp_path: Path) -> None:
    copy = tmp_path / "README.md"
    copy.write_text("no marks")
    with pytest.raises(ValueError, match="needs the marks"):
        readme.update(copy)
    assert copy.read_text() == "no marks"


def test_a_readme_without_results_has_no_tables(tmp_path: Path) -> None:
    assert readme.render(tmp_path) == f"{readme.START}\n\n{readme.END}"


def gemm_row(kind: str, shape: shapes.Shape, ours: float, cublas: float | None) -> Row:
    m, n, k = shape
    sizes = {"kind": kind, "m": m, "n": n, "k": k}
    return {**sizes, "blocktensor": ours, "cublas": cublas, "tensorwise": 1250.0}


def test_the_readme_s_gemms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "FOLDER", readme.README.parent / "docs" / "no_plots")
    rows = [
        gemm_row("fprop", (4096, 2048, 7168), 1200.0, 1000.0) | {"bf16": 600.0, "deepgemm": 1200.0},
        gemm_row("fprop", (4096, 2048, 2048), 1000.0, 1000.0),
        gemm_row("wgrad", (4096, 2048, 7168), 900.0, None),
    ]
    results.write("gemm", rows, tmp_path, absent={"torchao": "No module", "deepgemm": "No module"})
    lines = readme.render(tmp_path).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert table[2] == "| 4096 x (2048 x 7168) | 1200 | 1.20x | 0.96x | 900 | – | 0.72x |"
    assert table[3] == "| 4096 x (2048 x 2048) | 1000 | 1.00x | 0.80x | – | – | – |"
    assert table[4] == "| geometric mean |  | 1.10x | 0.88x |  | – | 0.72x |"
    means = "Against other peers, geometric means: forward 2.00x bf16, 1.00x DeepGEMM."
    assert means in lines
    source = next(line for line in lines if line.startswith("(`python"))
    assert source.startswith("(`python -m benchmarks gemm`, ")
    assert source.endswith("; not installed there: deepgemm, torchao)")


def test_the_readme_s_casts_keep_precisions_apart(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"op": "rowwise", "dtype": "bfloat16", "m": 4, "k": 2, "share_of_copy": 0.98},
        {"op": "rowwise", "dtype": "bfloat16", "m": 8, "k": 2, "share_of_copy": 0.99},
        {"op": "rowwise", "dtype": "float32", "m": 8, "k": 2, "share_of_copy": 0.5},
        {"op": "transpose", "dtype": "float8_e4m3fn", "m": 8, "k": 2, "share_of_copy": 0.6},
    ]
    results.write("cast", rows, tmp_path)
    lines = [line for line in readme.render(tmp_path).splitlines() if line.startswith("|")]
    assert lines[0] == "| cast | 8 x 2 | 4 x 2 |"
    assert lines[2:] == [
        "| rowwise, bf16 | 99% | 98% |",
        "| rowwise, fp32 | 50% | – |",
        "| transpose | 60% | – |",
    ]


def test_the_readme_s_host_times(tmp_path: Path) -> None:
    results.write("host", [{"what": "cast", "us": 9.5}, {"what": "gemm"}], tmp_path)
    lines = [line for line in readme.render(tmp_path).splitlines() if line.startswith("|")]
    assert lines == ["| what | us |", "|---|---|", "| cast | 9.5 |", "| gemm | – |"]


def test_plots_are_shown_once_they_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "FOLDER", tmp_path / "docs" / "plots")
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    results.write("linear", [], tmp_path)
    assert "![" not in readme.render(tmp_path)
    plots.FOLDER.mkdir(parents=True)
    (plots.FOLDER / "linear_speedup.png").touch()
    assert "\n![speed-up of linears](docs/plots/linear_speedup.png)\n" in readme.render(tmp_path)


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
        total=lambda **_: 2,
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


def test_the_bars_shapes_are_measured() -> None:
    assert len(set(shapes.SET_S)) == 13
    assert gemm.total() == 39
    assert linear.total() == len(shapes.LINEAR) == 8
    assert cast.total() == 65
    assert gemm.total(**gemm.QUICK) == 3
    assert cast.total(**cast.QUICK) == 13


def test_host_time_is_a_median_with_the_gpu_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits, slow = [0.0], [0], iter([5e-3] * 30 + [1e-3] + [2e-6] * 2 + [9e-3])

    def call() -> None:
        assert waits[0] in (0, 1)
        waits[0] = 0
        now[0] += next(slow)

    monkeypatch.setattr("torch.cuda.synchronize", lambda: waits.__setitem__(0, 1))
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert host.host_us(call, calls=3) == pytest.approx(2)
