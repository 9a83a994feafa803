"""Plots are made from results on disk, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as cli
from benchmarks import plots, results
from benchmarks.results import Row

pytest.importorskip("matplotlib")

SHAPE = {"m": 4096, "n": 2048, "k": 2048}
GEMM: list[Row] = [
    {**SHAPE, "kind": "fprop", "blocktensor": 1050.0, "cublas": 930.0, "tensorwise": 1120.0},
    {**SHAPE, "kind": "wgrad", "blocktensor": 930.0, "cublas": None, "deepgemm": 900.0},
]
LINEAR: list[Row] = [{**SHAPE, "eager_speedup": 0.8, "graph_speedup": 1.0}]
CAST: list[Row] = [
    {"op": "rowwise", "dtype": "bfloat16", "m": 4096, "k": 2048, "share_of_copy": 0.5},
    {"op": "rowwise", "dtype": "float32", "m": 4096, "k": 2048, "share_of_copy": 0.6},
    {"op": "transpose", "dtype": "float8_e4m3fn", "m": 4096, "k": 2048, "share_of_copy": 0.4},
]


MEMORY = [
    {"policy": p, "mode": "eager", "weights_mib": w, "saved_mib": 5.0, "peak_mib": 20.0}
    for p, w in (("bf16", 8.0), ("fp8, frozen", 4.0))
]


GROUPED: list[Row] = [
    {"experts": 4, "tokens": 512, "n": 8, "k": 16, "kind": kind, "groups": groups}
    | {"blocktensor": rate, "dense": 1200.0, "bf16": 600.0}
    for kind, groups, rate in (
        *(("fprop", "ragged", 1100.0), ("fprop", "aligned", 1150.0)),
        *(("wgrad", "ragged", 900.0), ("wgrad", "aligned", 950.0), ("cast", "ragged", 3000.0)),
    )
]
EXPERTS: list[Row] = [
    {"what": "layer", "experts": 8, "tokens": 64, "variant": "bf16", "gemms_us": 3000.0}
    | {"elementwise_us": 500.0},
    {"what": "layer", "experts": 8, "tokens": 64, "variant": "fp8", "gemms_us": 2000.0}
    | {"elementwise_us": 250.0},
    {"what": "Qwen3-MoE, 2 layers", "experts": 8, "tokens": 64, "variant": "fp8"},
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    named = (
        *(("gemm", GEMM), ("linear", LINEAR), ("cast", CAST), ("memory", MEMORY)),
        *(("grouped", GROUPED), ("experts", EXPERTS)),
    )
    for name, rows in named:
        results.write(name, rows, tmp_path / "results")
    return tmp_path / "results"


def is_drawing(path: Path) -> bool:
    """Whether the file is a PNG that has more than a background."""
    from matplotlib.image import imread

    return bool(imread(path)[..., :3].std() > 0.01)


def test_every_plot_is_drawn(source: Path, tmp_path: Path) -> None:
    written = plots.draw(source, tmp_path / "plots")
    assert [path.name for path in written] == [plot.file for plot in plots.PLOTS]
    assert all(is_drawing(path) for path in written)
    assert plots.missing(source) == []


@pytest.mark.parametrize(
    ("file", "rows", "heights"),
    [
        ("gemm_fprop", GEMM, [1050.0, 930.0]),
        ("gemm_wgrad", GEMM, [930.0, 900.0]),  # a kernel without a number has no bar
        ("cast_roofline", CAST, [50.0, 40.0]),  # not from fp32
        ("memory_peak", MEMORY, [8.0, 4.0, 5.0, 5.0, 7.0, 11.0]),  # parts of the peak
        ("grouped_wgrad", GROUPED, [900.0, 600.0, 1200.0]),  # ragged groups of one kind
        ("experts_time", EXPERTS, [3.0, 2.0, 0.5, 0.25]),  # layers alone
    ],
)
def test_bars(file: str, rows: list[Row], heights: list[float]) -> None:
    from matplotlib.figure import Figure

    axes: Any = Figure().subplots()
    (plot,) = (plot for plot in plots.PLOTS if plot.file == f"{file}.png")
    plot.draw(axes, rows)
    assert [bar.get_height() for bar in axes.patches] == heights
    if file == "gemm_fprop":
        (line,) = axes.collections
        assert [y for _, y in line.get_segments()[0]] == [1120.0, 1120.0], "the limit"
    if file == "experts_time":
        assert [bar.get_y() for bar in axes.patches] == [0.0, 0.0, 3.0, 2.0], "on each other"
    if file == "grouped_wgrad":
        assert [text.get_text() for text in axes.get_xticklabels()] == ["4: 512 x (8 x 16)"]


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
    drawn = ["linear_speedup.png", "cast_roofline.png", "memory_peak.png"]
    drawn += ["grouped_fprop.png", "grouped_wgrad.png", "experts_time.png"]
    assert [Path(line.removeprefix("drawn: ")).name for line in shown[:6]] == drawn
    assert shown[6:] == ["gemm.json is missing: python -m benchmarks gemm"]
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == sorted(drawn)
