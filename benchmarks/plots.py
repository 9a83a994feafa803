"""Plots made from the results on disk alone: ``python -m benchmarks plot``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import results
from .results import Row, columns, select
from .shapes import label, label_of_experts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).parent.parent / "docs" / "plots"

NAMES = {
    "blocktensor": "blocktensor",
    "cublas": "cuBLAS blockwise",
    "deepgemm": "DeepGEMM",
    "torchao": "torchao Triton",
    "bf16": "bf16",
    "dense": "blocktensor, one matrix",
}
COLOURS = {
    "blocktensor": "#ee6677",
    "cublas": "#4477aa",
    "deepgemm": "#228833",
    "torchao": "#ccbb44",
    "bf16": "#bbbbbb",
    "dense": "#aa3377",
}


@dataclass(frozen=True)
class Plot:
    """One PNG: its file, the result it is made from, its title, and what draws it."""

    file: str
    result: str
    title: str
    draw: Any


def _grouped_bars(axes: Axes, groups: Sequence[str], bars: dict[str, list[float | None]]) -> None:
    """Bars of every series side by side over each group; a series without a number has a gap."""
    width = 0.8 / len(bars)
    for index, (name, values) in enumerate(bars.items()):
        places = [g - 0.4 + (index + 0.5) * width for g in range(len(groups))]
        drawn = [(x, v) for x, v in zip(places, values, strict=True) if v is not None]
        axes.bar(
            [x for x, _ in drawn],
            [v for _, v in drawn],
            width,
            label=NAMES.get(name, name),
            color=COLOURS.get(name, f"C{index}"),
        )
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right", fontsize=8)


def _stacked(
    axes: Axes, names: Sequence[str], parts: dict[str, list[float]], fontsize: int
) -> None:
    """One bar a name: its parts on top of each other."""
    below = [0.0] * len(names)
    for index, (part, sizes) in enumerate(parts.items()):
        axes.bar(range(len(names)), sizes, 0.7, bottom=below, label=part, color=f"C{index}")
        below = [b + size for b, size in zip(below, sizes, strict=True)]
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=fontsize)


def _gemm(axes: Axes, rows: Sequence[Row], kind: str) -> None:
    rows = select(rows, {"kind": kind})
    groups = [label(r["m"], r["n"], r["k"]) for r in rows]
    present = columns(rows)
    shown = [name for name in NAMES if name in present]
    _grouped_bars(axes, groups, {name: [r.get(name) for r in rows] for name in shown})
    for place, row in enumerate(rows):
        limit = row.get("tensorwise")
        if limit is not None:
            text = "cuBLAS tensorwise (limit)" if place == 0 else "_nolegend_"
            axes.hlines(limit, place - 0.42, place + 0.42, color="black", linewidth=1.4, label=text)
    axes.set_ylabel("TFLOP/s")


def _linear(axes: Axes, rows: Sequence[Row]) -> None:
    series = {"eager": "eager_speedup", "CUDA graph": "graph_speedup"}
    if "eager_torchao_speedup" in columns(rows):
        series["torchao, eager"] = "eager_torchao_speedup"
    groups = [label(r["m"], r["n"], r["k"]) for r in rows]
    bars = {name: [r.get(column) for r in rows] for name, column in series.items()}
    _grouped_bars(axes, groups, bars)
    axes.axhline(1, color="black", linewidth=1, label="bf16")
    axes.set_ylabel("speed-up over bf16")


def _cast(axes: Axes, rows: Sequence[Row]) -> None:
    rows = [r for r in rows if r["dtype"] != "float32"]
    sizes = sorted({(r["m"], r["k"]) for r in rows}, key=lambda s: -s[0] * s[1])
    share = {(r["op"], r["m"], r["k"]): r["share_of_copy"] * 100 for r in rows}
    ops = list(dict.fromkeys(r["op"] for r in rows))
    bars = {op: [share.get((op, *size)) for size in sizes] for op in ops}
    _grouped_bars(axes, [f"{m} x {k}" for m, k in sizes], bars)
    axes.axhline(100, color="black", linewidth=1.4, label="copy (limit)")
    axes.set_ylabel("share of the copy bandwidth (%)")


def _memory(axes: Axes, rows: Sequence[Row]) -> None:
    """One bar a policy and mode: weights at the bottom, saved activations, the rest of the peak."""
    names = [f"{r['policy']}, {r['mode']}" for r in rows]
    parts = {
        "weights at rest": [r["weights_mib"] for r in rows],
        "saved activations": [r["saved_mib"] for r in rows],
        "gradients, FP8 weights, temporaries": [
            r["peak_mib"] - r["weights_mib"] - r["saved_mib"] for r in rows
        ],
    }
    _stacked(axes, names, parts, 7)
    axes.set_ylabel("peak of a forward + backward (MiB)")


def _grouped(axes: Axes, rows: Sequence[Row], kind: str) -> None:
    rows = select(rows, {"kind": kind, "groups": "ragged"})
    groups = [label_of_experts(r["experts"], r["tokens"], r["n"], r["k"]) for r in rows]
    shown = [name for name in NAMES if name in columns(rows)]
    _grouped_bars(axes, groups, {name: [r.get(name) for r in rows] for name in shown})
    axes.set_ylabel("TFLOP/s")


def _experts(axes: Axes, rows: Sequence[Row]) -> None:
    """One bar a layer and variant: milliseconds of each kind of kernels, on top of each other."""
    rows = select(rows, {"what": "layer"})
    names = [f"{r['experts']} x {r['tokens']}, {r['variant']}" for r in rows]
    kinds = [column for column in columns(rows) if column.endswith("_us")]
    parts = {
        kind.removesuffix("_us").replace("_", " "): [(r.get(kind) or 0.0) / 1e3 for r in rows]
        for kind in kinds
    }
    _stacked(axes, names, parts, 8)
    axes.set_ylabel("forward + backward (ms of kernels)")


PLOTS = (
    Plot(
        "gemm_fprop.png",
        "gemm",
        "Forward and data gradient, 1x128 by 128x128",
        partial(_gemm, kind="fprop"),
    ),
    Plot("gemm_wgrad.png", "gemm", "Weight gradient, 1x128 by 1x128", partial(_gemm, kind="wgrad")),
    Plot("linear_speedup.png", "linear", "nn.Linear, forward + backward", _linear),
    Plot("cast_roofline.png", "cast", "Casts from bf16, transpose, dequantize", _cast),
    Plot("memory_peak.png", "memory", "Memory of four Llama-8B-shaped blocks by policy", _memory),
    Plot(
        "grouped_fprop.png",
        "grouped",
        "Experts, forward, ragged groups",
        partial(_grouped, kind="fprop"),
    ),
    Plot(
        "grouped_wgrad.png",
        "grouped",
        "Experts, weight gradient, ragged",
        partial(_grouped, kind="wgrad"),
    ),
    Plot("experts_time.png", "experts", "Experts with SwiGLU, forward + backward", _experts),
)


def missing(source: Path = results.FOLDER) -> list[str]:
    """Names of the results that plots need and that are not there."""
    names = dict.fromkeys(plot.result for plot in PLOTS)
    return [name for name in names if results.load(name, source) is None]


def draw(source: Path = results.FOLDER, target: Path | None = None) -> list[Path]:
    """Write every plot whose results are in ``source``; the files written."""
    target = FOLDER if target is None else target
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written = []
    for plot in PLOTS:
        content = results.load(plot.result, source)
        if content is None:
            continue
        target.mkdir(parents=True, exist_ok=True)
        # Without pyplot, which would look for a display and keep the figure alive.
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        plot.draw(axes, content["rows"])
        where = content["environment"]
        axes.set_title(f"{plot.title} ({where['device']}, {where['date']})", fontsize=11)
        axes.grid(axis="y", alpha=0.2)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(frameon=False, fontsize=8, ncols=8, loc="outside lower center")
        figure.savefig(target / plot.file, format="png", dpi=130)
        written.append(target / plot.file)
    return written
