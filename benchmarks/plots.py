"""Plots made from the results on disk alone: ``python -m benchmarks plot``.

Bars are horizontal, so that names are read as they stand. blocktensor is red in every plot, in
lighter tones where a plot has several of its ways; grey is bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

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
    "dense": "#f7b3bb",
}
OURS = ("#ee6677", "#f28d99", "#f7b3bb", "#fad0d5", "#fce4e7")
"""Tones of blocktensor, for several of its ways or sizes."""
PARTS = ("#bbbbbb", "#4477aa", "#66ccee", "#228833", "#ccbb44", "#aa3377")
"""Parts of one number: of the memory, of the time."""

Bars = Mapping[str, tuple[str, Sequence[float | None]]]
"""By the name of a series: its colour, and its number in each group."""


@dataclass(frozen=True)
class Plot:
    """One PNG.

    Attributes:
        file: its name below :data:`FOLDER`.
        result: what it is made from.
        title: printed above it, with the card and the date.
        draw: draws rows into axes.
        panels: splits rows to panels side by side, by their titles; None: one without a title.
    """

    file: str
    result: str
    title: str
    draw: Callable[[Axes, Sequence[Row]], None]
    panels: Callable[[Sequence[Row]], Mapping[str, Sequence[Row]]] | None = None


def _bars(axes: Axes, groups: Sequence[str], bars: Bars, unit: str) -> None:
    """Bars of every series below each other in each group; without a number there is a gap."""
    height = 0.8 / len(bars)
    for index, (name, (colour, values)) in enumerate(bars.items()):
        places = [group - 0.4 + (index + 0.5) * height for group in range(len(groups))]
        drawn = [(y, v) for y, v in zip(places, values, strict=True) if v is not None]
        axes.barh([y for y, _ in drawn], [v for _, v in drawn], height, label=name, color=colour)
    _name_groups(axes, groups, unit)


def _stacked(
    axes: Axes, groups: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str
) -> None:
    """One bar a group: its parts one after the other."""
    before = [0.0] * len(groups)
    for (part, sizes), colour in zip(parts.items(), PARTS, strict=False):
        axes.barh(range(len(groups)), sizes, 0.7, left=before, label=part, color=colour)
        before = [b + size for b, size in zip(before, sizes, strict=True)]
    _name_groups(axes, groups, unit)


def _name_groups(axes: Axes, groups: Sequence[str], unit: str) -> None:
    axes.set_yticks(range(len(groups)), groups, fontsize=8)
    axes.set_ylim(len(groups) - 0.5, -0.5)  # the first group on top
    axes.set_xlabel(unit, fontsize=9)


def _kernels(axes: Axes, rows: Sequence[Row], groups: Sequence[str]) -> None:
    present = columns(rows)
    shown = [key for key in NAMES if key in present]
    bars = {NAMES[key]: (COLOURS[key], [row.get(key) for row in rows]) for key in shown}
    _bars(axes, groups, bars, "TFLOP/s")


def _gemm(axes: Axes, rows: Sequence[Row], kind: str) -> None:
    rows = select(rows, {"kind": kind})
    _kernels(axes, rows, [label(r["m"], r["n"], r["k"]) for r in rows])
    for place, row in enumerate(rows):
        limit = row.get("tensorwise")
        if limit is not None:
            text = "cuBLAS tensorwise (limit)" if place == 0 else "_nolegend_"
            axes.vlines(limit, place - 0.42, place + 0.42, color="black", linewidth=1.4, label=text)


def _grouped(axes: Axes, rows: Sequence[Row], kind: str) -> None:
    rows = select(rows, {"kind": kind, "groups": "ragged"})
    names = [label_of_experts(r["experts"], r["tokens"], r["n"], r["k"]) for r in rows]
    _kernels(axes, rows, names)


def _linear(axes: Axes, rows: Sequence[Row]) -> None:
    ways = {"eager": ("eager_speedup", OURS[0]), "CUDA graph": ("graph_speedup", OURS[2])}
    if "eager_torchao_speedup" in columns(rows):
        ways["torchao, eager"] = "eager_torchao_speedup", COLOURS["torchao"]
    bars = {
        name: (colour, [r.get(column) for r in rows]) for name, (column, colour) in ways.items()
    }
    _bars(axes, [label(r["m"], r["n"], r["k"]) for r in rows], bars, "speed-up over bf16")
    axes.axvline(1, color="black", linewidth=1, label="bf16")


def _block(axes: Axes, rows: Sequence[Row]) -> None:
    """Eager and compiled, beside torchao where it was measured."""
    rows = [row for row in rows if row["variant"] != "bf16"]
    for at, row in enumerate(rows):
        tones = ("#ccbb44", "#e6dda2") if row["variant"].startswith("torchao") else OURS[::2]
        ways = zip(("eager", "compiled"), tones, (-0.2, 0.2), strict=False)
        for way, colour, beside in ways:
            speed = row.get(f"{way}_speedup")
            if speed is not None:
                axes.barh(at + beside, speed, 0.4, color=colour)
                axes.text(speed + 0.01, at + beside, f"{way} {speed:.2f}", va="center", fontsize=7)
    _name_groups(axes, [row["variant"] for row in rows], "speed-up over bf16 in the same mode")
    axes.axvline(1, color="black", linewidth=1, label="bf16")


def _cast(axes: Axes, rows: Sequence[Row]) -> None:
    rows = [r for r in rows if r["dtype"] != "float32"]
    sizes = sorted({(r["m"], r["k"]) for r in rows}, key=lambda s: -s[0] * s[1])
    share = {(r["op"], r["m"], r["k"]): r["share_of_copy"] * 100 for r in rows}
    ops = list(dict.fromkeys(r["op"] for r in rows))
    bars = {
        f"{m} x {k}": (colour, [share.get((op, m, k)) for op in ops])
        for (m, k), colour in zip(sizes, OURS, strict=False)
    }
    _bars(axes, ops, bars, "share of the copy bandwidth (%)")
    axes.axvline(100, color="black", linewidth=1.4, label="copy (limit)")


def _memory(axes: Axes, rows: Sequence[Row]) -> None:
    """One bar a policy: weights first, then saved activations, then the rest of the peak."""
    parts = {
        "weights at rest": [r["weights_mib"] for r in rows],
        "saved activations": [r["saved_mib"] for r in rows],
        "gradients, FP8 weights, temporaries": [
            r["peak_mib"] - r["weights_mib"] - r["saved_mib"] for r in rows
        ],
    }
    _stacked(axes, [r["policy"] for r in rows], parts, "peak of a forward + backward (MiB)")


def _experts(axes: Axes, rows: Sequence[Row]) -> None:
    """One bar a variant: milliseconds of each kind of kernels, one after the other."""
    kinds = [column for column in columns(rows) if column.endswith("_us")]
    parts = {
        kind.removesuffix("_us").replace("_", " "): [(r.get(kind) or 0.0) / 1e3 for r in rows]
        for kind in kinds
    }
    _stacked(axes, [r["variant"] for r in rows], parts, "ms of kernels")


def _by_mode(rows: Sequence[Row]) -> dict[str, Sequence[Row]]:
    return {mode: select(rows, {"mode": mode}) for mode in dict.fromkeys(r["mode"] for r in rows)}


def _by_layer(rows: Sequence[Row]) -> dict[str, Sequence[Row]]:
    """Return the rows of each layer: layers differ tenfold in time, so each has its own scale."""
    found: dict[str, list[Row]] = {}
    for row in select(rows, {"what": "layer"}):
        shape = f"{row['experts']} experts of {row['tokens']} x ({row['hidden']} x {row['dim']})"
        found.setdefault(shape, []).append(row)
    return dict(found)


PLOTS = (
    Plot("block_speedup.svg", "block", "Llama-8B-shaped blocks, forward + backward", _block),
    Plot("linear_speedup.svg", "linear", "nn.Linear, forward + backward", _linear),
    Plot(
        "gemm_fprop.svg",
        "gemm",
        "Forward and data gradient, 1x128 by 128x128",
        partial(_gemm, kind="fprop"),
    ),
    Plot(
        "gemm_wgrad.svg",
        "gemm",
        "Weight gradient, 1x128 by 128x128",
        partial(_gemm, kind="square"),
    ),
    Plot("cast_roofline.svg", "cast", "Casts from bf16, transpose, dequantize", _cast),
    Plot("memory_peak.svg", "memory", "Memory of four Llama-8B-shaped blocks", _memory, _by_mode),
    Plot(
        "grouped_fprop.svg",
        "grouped",
        "Experts, forward, ragged groups",
        partial(_grouped, kind="fprop"),
    ),
    Plot(
        "grouped_wgrad.svg",
        "grouped",
        "Experts, weight gradient, ragged groups",
        partial(_grouped, kind="square"),
    ),
    Plot(
        "experts_time.svg",
        "experts",
        "Experts with SwiGLU, forward + backward",
        _experts,
        _by_layer,
    ),
)


def missing(source: Path = results.FOLDER) -> list[str]:
    """Names of the results that plots need and that are not there."""
    names = dict.fromkeys(plot.result for plot in PLOTS)
    return [name for name in names if results.load(name, source) is None]


def draw(source: Path = results.FOLDER, target: Path | None = None) -> list[Path]:
    """Write every plot whose results are in ``source``; the files written."""
    target = FOLDER if target is None else target
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    written = []
    for plot in PLOTS:
        content = results.load(plot.result, source)
        if content is None:
            continue
        target.mkdir(parents=True, exist_ok=True)
        rows = content["rows"]
        panels = {"": rows} if plot.panels is None else plot.panels(rows)
        # Without pyplot, which would look for a display and keep the figure alive.
        figure = Figure(layout="constrained")
        side_by_side = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (title, of_panel) in zip(side_by_side, panels.items(), strict=True):
            plot.draw(axes, of_panel)
            axes.set_title(title, fontsize=9)
            axes.grid(axis="x", alpha=0.2)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        first = side_by_side[0]
        bars, groups = len(first.patches), len(first.get_yticks())
        figure.set_size_inches(9, 1.5 + max(0.11 * bars, 0.27 * groups))
        where = content["environment"]
        figure.suptitle(f"{plot.title} ({where['device']}, {where['date']})", fontsize=11)
        handles, texts = first.get_legend_handles_labels()
        figure.legend(
            handles, texts, frameon=False, fontsize=8, ncols=4, loc="outside lower center"
        )
        # Texts are texts, and equal results make equal files.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.file}):
            figure.savefig(target / plot.file, metadata={"Date": None})
        written.append(target / plot.file)
    return written
