"""The generated parts of README.md and docs/results.md."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as cli
from benchmarks import page_parts, plots, results, results_page, shapes
from benchmarks.results import Row
from benchmarks.results_page import END, PAGES, README, RESULTS, START, Page

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)


def rows_shown(folder: Path) -> list[str]:
    """The lines of tables on the page of results."""
    return [line for line in RESULTS.render(folder).splitlines() if line.startswith("|")]


@pytest.fixture
def no_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "FOLDER", tmp_path / "no_plots")


@each_page
def test_a_page_shows_the_results_on_disk(page: Page) -> None:
    assert page.render() in page.path.read_text("utf-8"), "run: python -m benchmarks page"


@each_page
@pytest.mark.usefixtures("no_plots")
def test_updating_changes_the_generated_part_alone(page: Page, tmp_path: Path) -> None:
    copy = replace(page, path=tmp_path / "copy.md")
    copy.path.write_text(f"above\n{START}\nold\n{END}\nbelow\n")
    assert copy.update()
    assert copy.path.read_text("utf-8") == f"above\n{copy.render()}\nbelow\n"
    assert not copy.update()


def test_a_page_without_marks_is_an_error(tmp_path: Path) -> None:
    copy = replace(README, path=tmp_path / "README.md")
    copy.path.write_text("no marks")
    with pytest.raises(ValueError, match="needs the marks"):
        copy.update()
    assert copy.path.read_text() == "no marks"


@each_page
def test_without_results_a_page_has_no_tables(page: Page, tmp_path: Path) -> None:
    assert page.render(tmp_path) == f"{START}\n\n{END}"


@pytest.mark.usefixtures("no_plots")
def test_the_command_updates_every_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = [replace(page, path=tmp_path / page.path.name) for page in PAGES]
    monkeypatch.setattr(results_page, "PAGES", copies)
    monkeypatch.setattr(results_page, "ROOT", tmp_path)
    for copy in copies:
        copy.path.write_text(f"{START}\n{END}\n")
    for done in ("updated", "is up to date"):
        assert cli.main(["page"]) == 0
        assert capsys.readouterr().out == f"README.md {done}\nresults.md {done}\n"
        assert all(copy.path.read_text("utf-8") == f"{copy.render()}\n" for copy in copies)


@each_page
def test_plots_are_linked_once_they_are_drawn(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "FOLDER", tmp_path / "docs" / "plots")
    folder = "docs/plots" if page is README else "plots"
    copy = replace(page, path=tmp_path / page.path.relative_to(results_page.ROOT))
    results.write("linear", [], tmp_path)
    assert "![" not in copy.render(tmp_path)
    plots.FOLDER.mkdir(parents=True)
    (plots.FOLDER / "linear_speedup.png").touch()
    link = f"![speed-up of linear layers]({folder}/linear_speedup.png)"
    assert link in copy.render(tmp_path).splitlines()


def gemm_row(kind: str, shape: shapes.Shape, ours: float, cublas: float | None) -> Row:
    m, n, k = shape
    sizes = {"kind": kind, "m": m, "n": n, "k": k}
    return {**sizes, "blocktensor": ours, "cublas": cublas, "tensorwise": 1250.0}


@pytest.mark.usefixtures("no_plots")
def test_gemms(tmp_path: Path) -> None:
    rows = [
        gemm_row("fprop", (4096, 2048, 7168), 1200.0, 1000.0) | {"bf16": 600.0, "deepgemm": 1200.0},
        gemm_row("fprop", (4096, 2048, 2048), 1000.0, 1000.0),
        gemm_row("wgrad", (4096, 2048, 7168), 900.0, None),
    ]
    results.write("gemm", rows, tmp_path, absent={"torchao": "No module", "deepgemm": "No module"})
    lines, table = RESULTS.render(tmp_path).splitlines(), rows_shown(tmp_path)
    assert table[2] == "| 4096 x (2048 x 7168) | 1200 | 1.20x | 0.96x | 900 | – | 0.72x |"
    assert table[3] == "| 4096 x (2048 x 2048) | 1000 | 1.00x | 0.80x | – | – | – |"
    assert table[4] == "| geometric mean |  | 1.10x | 0.88x |  | – | 0.72x |"
    text = " ".join(lines)
    assert "geometric means: forward 2.00x bf16, 1.00x DeepGEMM." in text
    assert "(`python -m benchmarks gemm`, " in text
    assert "; not installed there: deepgemm, torchao)" in text
    assert all(len(line) <= page_parts.LINE_LENGTH for line in lines)


def test_host_times(tmp_path: Path) -> None:
    results.write("host", [{"what": "cast", "us": 9.5}, {"what": "gemm"}], tmp_path)
    lines = rows_shown(tmp_path)
    assert lines == ["| what | us |", "|---|---|", "| cast | 9.5 |", "| gemm | – |"]


def test_losses_of_both_demos(tmp_path: Path) -> None:
    runs = [
        {"seed": 3, "precision": precision, "heldout_loss": loss}
        for precision, loss in (("bf16", 2.0), ("fp8", 2.01))
    ]
    for name, model in (("train_lm", {}), ("train_moe", {"experts": 8})):
        config = {"parameters": 1.1e8, "steps": 400, "model": model}
        demo = {"runs": runs, "config": config, "device": {"name": "CPU"}, "date": "2026-01-02T3"}
        (tmp_path / f"{name}.json").write_text(json.dumps(demo))
    text = RESULTS.render(tmp_path)
    assert text.count("| 3 | 2.0000 | 2.0100 | +0.50% |") == 2
    assert "**The demo's model, 110M parameters, 400 steps**" in text
    assert "(`python examples/train_lm.py --seeds 1`, CPU, 2026-01-02)" in text
    assert "**The demo's mixture of experts, 110M parameters, 400 steps**" in text
    assert "(`python examples/train_lm.py --experts 8 --seeds 1`, CPU, 2026-01-02)" in text


@pytest.mark.parametrize(
    ("device", "folder"),
    [("NVIDIA H200", "."), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA L40S", ".")],
)
def test_results_of_a_card_have_a_folder(
    device: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: device)
    assert results.here() == tmp_path / folder
