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


def test_the_limit_is_a_line_over_each_shape(source: Path) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots._fprop(axes, GEMM)
    heights = [bar.get_height() for bar in axes.patches]  # type: ignore[attr-defined]
    assert heights == [1050.0, 930.0]
    (line,) = axes.collections
    assert [y for _, y in line.get_segments()[0]] == [1120.0, 1120.0]  # type: ignore[attr-defined]


def test_a_kernel_without_a_number_has_no_bar(source: Path) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots._wgrad(axes, GEMM)
    heights = [bar.get_height() for bar in axes.patches]  # type: ignore[attr-defined]
    assert heights == [930.0, 900.0]


def test_casts_from_fp32_are_not_drawn() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots._cast(axes, CAST)
    heights = [bar.get_height() for bar in axes.patches]  # type: ignore[attr-defined]
    assert heights == [50.0, 40.0]


def test_memory_is_drawn_in_parts_that_add_up_to_the_peak() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots._memory(axes, MEMORY)
    heights = [bar.get_height() for bar in axes.patches]  # type: ignore[attr-defined]
    assert heights == [8.0, 4.0, 5.0, 5.0, 7.0, 11.0]


def test_ragged_groups_of_one_kind_are_drawn() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots._grouped_wgrad(axes, GROUPED)
    heights = [bar.get_height() for bar in axes.patches]  # type: ignore[attr-defined]
    assert heights == [900.0, 600.0, 1200.0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["4: 512 x (8 x 16)"]


def test_kinds_of_kernels_add_up_over_each_layer() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots._experts(axes, EXPERTS)
    bars: list[Any] = list(axes.patches)
    assert [(bar.get_y(), bar.get_height()) for bar in bars] == [
        *((0.0, 3.0), (0.0, 2.0), (3.0, 0.5), (2.0, 0.25)),
    ]


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
