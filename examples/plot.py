"""The picture of a comparison: loss curves on the left, their relative difference on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {"bf16": "#4477aa", "fp8": "#ee6677"}
LABELS = {"bf16": "bf16", "fp8": "blockwise FP8"}


@dataclass(frozen=True)
class Curves:
    """The training losses of one run."""

    seed: int
    precision: str
    losses: Sequence[float]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over ``window`` steps at each point (over fewer near both ends)."""
    before, after = window // 2, window - window // 2
    # Not a running sum, in which a single nan would stay for ever.
    return [fmean(values[max(0, i - before) : i + after]) for i in range(len(values))]


def _draw_losses(axes: Axes, curves: Sequence[Curves], window: int) -> None:
    labelled: set[str] = set()
    for curve in curves:
        steps = range(1, len(curve.losses) + 1)
        colour = COLOURS[curve.precision]
        # One legend entry a precision, however many seeds.
        label = LABELS[curve.precision] if curve.precision not in labelled else None
        labelled.add(curve.precision)
        axes.plot(steps, curve.losses, color=colour, alpha=0.2, linewidth=0.7)
        # FP8 is dashed: where the two agree, the one below must still be seen.
        style = "--" if curve.precision == "fp8" else "-"
        axes.plot(
            steps,
            smooth(curve.losses, window),
            style,
            color=colour,
            label=label,
            linewidth=1.6,
            zorder=3,
        )
    axes.set_ylabel("training loss (nats per byte)")
    axes.set_title(f"Loss (faint: each step; line: mean of {window} steps)", fontsize=10)
    axes.legend(frameon=False)


def _draw_differences(axes: Axes, curves: Sequence[Curves], window: int) -> None:
    reference = {curve.seed: curve.losses for curve in curves if curve.precision == "bf16"}
    drawn = [curve for curve in curves if curve.precision == "fp8" and curve.seed in reference]
    axes.axhline(0, color="0.6", linewidth=0.8)
    for index, curve in enumerate(drawn):
        # An interrupted run has fewer steps, and a mean over steps it lacks would not compare.
        both = [losses[: len(curve.losses)] for losses in (curve.losses, reference[curve.seed])]
        fp8, bf16 = (smooth(losses, window) for losses in both)
        difference = [(a / b - 1) * 100 for a, b in zip(fp8, bf16, strict=True)]
        axes.plot(
            range(1, len(difference) + 1),
            difference,
            color=COLOURS["fp8"] if len(drawn) == 1 else f"C{index}",
            linewidth=1.4,
            label=f"seed {curve.seed}",
        )
    if not drawn:
        axes.text(0.5, 0.5, "no FP8 steps yet", transform=axes.transAxes, ha="center", color="0.4")
    elif len(drawn) > 1:
        axes.legend(frameon=False, fontsize=8)
    axes.set_ylabel("FP8 loss relative to bf16 (%)")
    axes.set_title(f"Relative difference of the {window}-step means", fontsize=10)


def plot_curves(curves: Sequence[Curves], path: Path, *, title: str, steps: int) -> None:
    """Draw ``curves`` into a PNG file at ``path``; ``steps`` is what a whole run has."""
    window = max(2, steps // 20)
    # Without pyplot, which would look for a display and keep the figure alive.
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_losses(left, curves, window)
    _draw_differences(right, curves, window)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.set_xlim(0, steps)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, format="png", dpi=150)
