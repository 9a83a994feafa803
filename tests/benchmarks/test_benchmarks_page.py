"""The generated parts of README.md and docs/results/, and plots, from results on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as cli
from benchmarks import page_models, plots, popular, results, results_page
from benchmarks.results import Row
from benchmarks.results_page import END, PAGES, README, START, Page

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)


@each_page
def test_a_page_shows_the_results_on_disk(page: Page) -> None:
    assert page.render() in page.path.read_text("utf-8"), "run: python -m benchmarks page"


def test_a_page_without_marks_is_an_error(tmp_path: Path) -> None:
    copy = replace(README, path=tmp_path / "README.md")
    copy.path.write_text("no marks")
    with pytest.raises(ValueError, match="needs the marks"):
        copy.update()
    assert copy.path.read_text() == "no marks"


@each_page
def test_without_results_a_page_has_no_tables(page: Page, tmp_path: Path) -> None:
    assert page.render(tmp_path) == f"{START}\n\n{END}"


def test_the_command_updates_the_generated_part_of_every_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "FOLDER", tmp_path / "no_plots")
    copies = [replace(page, path=tmp_path / page.path.name) for page in PAGES]
    monkeypatch.setattr(results_page, "PAGES", copies)
    monkeypatch.setattr(results_page, "ROOT", tmp_path)
    for copy in copies:
        copy.path.write_text(f"above\n{START}\nold\n{END}\nbelow\n")
    for done in ("updated", "is up to date"):
        assert cli.main(["page"]) == 0
        assert capsys.readouterr().out == "".join(f"{p.path.name} {done}\n" for p in PAGES)
        for copy in copies:
            assert copy.path.read_text("utf-8") == f"above\n{copy.render()}\nbelow\n"


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


SHAPE = {"m": 4096, "n": 2048, "k": 2048}
GROUPS = {"experts": 4, "tokens": 512, "n": 8, "k": 16, "dense": 1200.0, "bf16": 600.0}
LAYER = {"what": "layer", "experts": 8, "tokens": 64, "hidden": 16, "dim": 32}
MEASURED: dict[str, list[Row]] = {
    "block": [
        {"variant": v, "eager_speedup": speed, "compiled_speedup": speed}
        for v, speed in (("bf16", 1.0), ("fp8", 1.5), ("torchao rowwise", 1.25))
    ],
    "gemm": [
        {**SHAPE, "kind": "fprop", "blocktensor": 1050.0, "cublas": 930.0, "tensorwise": 1120.0},
        {**SHAPE, "kind": "square", "blocktensor": 930.0, "cublas": None, "deepgemm": 900.0},
        {**SHAPE, "kind": "wgrad", "blocktensor": 700.0},
    ],
    "linear": [{**SHAPE, "eager_speedup": 0.8, "graph_speedup": 1.0}],
    "cast": [
        {"op": "rowwise", "dtype": "bfloat16", "m": 4096, "k": 2048, "share_of_copy": 0.5},
        {"op": "rowwise", "dtype": "float32", "m": 4096, "k": 2048, "share_of_copy": 0.6},
        {"op": "transpose", "dtype": "float8_e4m3fn", "m": 4096, "k": 2048, "share_of_copy": 0.4},
    ],
    "memory": [
        {"policy": p, "mode": "eager", "weights_mib": w, "saved_mib": 5.0, "peak_mib": 20.0}
        for p, w in (("bf16", 8.0), ("fp8, frozen", 4.0))
    ],
    "grouped": [
        {**GROUPS, "kind": "fprop", "groups": "ragged", "blocktensor": 1100.0},
        {**GROUPS, "kind": "fprop", "groups": "aligned", "blocktensor": 1150.0},
        {**GROUPS, "kind": "square", "groups": "ragged", "blocktensor": 900.0},
        {**GROUPS, "kind": "square", "groups": "aligned", "blocktensor": 950.0},
        {**GROUPS, "kind": "cast", "groups": "ragged", "blocktensor": 3000.0},
    ],
    "experts": [
        {**LAYER, "variant": "bf16", "gemms_us": 3000.0, "elementwise_us": 500.0},
        {**LAYER, "variant": "fp8", "gemms_us": 2000.0, "elementwise_us": 250.0},
        {**LAYER, "variant": "fp8", "what": "Qwen3-MoE, 2 layers"},
    ],
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    pytest.importorskip("matplotlib")
    for name, rows in MEASURED.items():
        results.write(name, rows, tmp_path / "results")
    return tmp_path / "results"


def is_drawing(path: Path) -> bool:
    """Return True for an SVG with texts, and with bars besides its ground, axes and legend."""
    text = path.read_text("utf-8")
    return "</text>" in text and text.count('id="patch_') > 5


def test_every_plot_is_drawn(source: Path, tmp_path: Path) -> None:
    written = plots.draw(source, tmp_path / "plots")
    assert [path.name for path in written] == [plot.file for plot in plots.PLOTS]
    assert all(is_drawing(path) for path in written)
    assert plots.missing(source) == []


@pytest.mark.parametrize(
    ("file", "lengths"),
    [
        ("block_speedup", [1.5, 1.5, 1.25, 1.25]),
        ("gemm_fprop", [1050.0, 930.0]),
        ("gemm_wgrad", [930.0, 900.0]),  # a kernel without a number has no bar
        ("cast_roofline", [50.0, 40.0]),  # not from fp32
        ("memory_peak", [8.0, 4.0, 5.0, 5.0, 7.0, 11.0]),  # parts of the peak
        ("grouped_wgrad", [900.0, 600.0, 1200.0]),  # ragged groups of one kind
        ("experts_time", [3.0, 2.0, 0.5, 0.25]),  # layers alone
    ],
)
def test_bars(file: str, lengths: list[float]) -> None:
    axes: Any = pytest.importorskip("matplotlib.figure").Figure().subplots()
    (plot,) = (plot for plot in plots.PLOTS if plot.file == f"{file}.svg")
    rows = MEASURED[plot.result]
    if plot.panels is not None:
        (rows,) = map(list, plot.panels(rows).values())
    plot.draw(axes, rows)
    assert [bar.get_width() for bar in axes.patches] == lengths
    if file == "gemm_fprop":
        (line,) = axes.collections
        assert [x for x, _ in line.get_segments()[0]] == [1120.0, 1120.0], "the limit"
    if file == "experts_time":
        assert [bar.get_x() for bar in axes.patches] == [0.0, 0.0, 3.0, 2.0], "one after the other"
    if file == "grouped_wgrad":
        assert [text.get_text() for text in axes.get_yticklabels()] == ["4: 512 x (8 x 16)"]


def test_missing_results_are_named_and_the_rest_is_drawn(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (source / "gemm.json").unlink()
    monkeypatch.setattr(plots, "FOLDER", tmp_path / "plots")
    assert cli.main(["plot", "--out", str(source)]) == 0
    shown = capsys.readouterr().out.splitlines()
    drawn = [plot.file for plot in plots.PLOTS if plot.result != "gemm"]
    assert [Path(line.removeprefix("drawn: ")).name for line in shown[:-1]] == drawn
    assert shown[-1:] == ["gemm.json is missing: python -m benchmarks gemm"]
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == sorted(drawn)


def popular_rows(model: str, tokens: int, *speeds: float) -> list[Row]:
    """Rows of a model: eager and captured speeds of bf16 and of each variant."""
    pairs = zip((1.0, *speeds[::2]), (1.0, *speeds[1::2]), strict=True)
    return [
        {
            "model": model,
            "tokens": tokens,
            "variant": variant,
            "eager_speedup": eager,
            "graphs_speedup": graphs,
        }
        for variant, (eager, graphs) in zip(popular.VARIANTS, pairs, strict=True)
    ]


def test_popular_models_of_a_run_that_was_stopped(tmp_path: Path) -> None:
    first, second, *others = popular.MODELS
    rows = [
        *popular_rows(first, 1024, 0.98, 1.02, 1.26, 1.31),
        *popular_rows(first, 16384, 1.04, 1.03, 1.54, 1.35),
        *popular_rows(second, 4096, 1.15, 1.12, 1.48, 1.33),
    ]
    written = results.write("popular", rows, tmp_path, environment={"backward": results.AUTOGRAD})
    content = results.load("popular", tmp_path)
    assert content is not None
    assert content["environment"]["backward"] == results.AUTOGRAD
    in_brief = "\n".join(page_models.popular_in_brief(content, written)).splitlines()
    assert [line for line in in_brief if line.startswith(("| Q", "| L"))] == [
        f"| {first} | 0.98x | 1.26x | – | – |",
        f"| {second} | – | – | 1.15x | 1.48x |",
    ]
    whole = "\n".join(page_models.popular(content, written))
    assert f"| {first} | 16,384 | 1.04x | 1.03x | 1.54x | 1.35x |" in whole
    for text in (whole, "\n".join(in_brief)):
        assert f"not measured: {', '.join(others)}" in text.replace("\n", " ")
