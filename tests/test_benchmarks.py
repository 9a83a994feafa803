"""What of the benchmarks runs without a GPU: results on disk, and the README made from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as cli
from benchmarks import host, readme, results


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


def test_results_carry_what_reproduces_them(tmp_path: Path) -> None:
    path = results.write("cast", [{"op": "rowwise", "us": 1.5}], tmp_path, copy_gb_s=4000)
    content = json.loads(path.read_text())
    assert content["rows"] == [{"op": "rowwise", "us": 1.5}]
    assert content["copy_gb_s"] == 4000
    wanted = {"device", "torch", "triton", "python", "date", "command"}
    assert set(content["environment"]) == wanted
    assert [p.name for p in tmp_path.iterdir()] == ["cast.json"]


def test_without_a_gpu_a_measurement_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["linear"]) == 2
    assert capsys.readouterr().err == "benchmarks need a CUDA GPU: none found\n"


def test_host_time_is_a_median_with_the_gpu_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits, slow = [0.0], [0], iter([5e-3] * 30 + [1e-3] + [2e-6] * 2 + [9e-3])

    def call() -> None:
        assert waits[0] in (0, 1)
        waits[0] = 0
        now[0] += next(slow)

    monkeypatch.setattr("torch.cuda.synchronize", lambda: waits.__setitem__(0, 1))
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert host.host_us(call, calls=3) == pytest.approx(2)
