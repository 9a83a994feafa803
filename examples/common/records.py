"""Writing a comparison down: what was run, where, and what came out; as JSON and as a picture."""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from common.gpt import GPT
from common.options import Options
from common.runs import replacing, versions, without_nan
from common.text import Corpus
from common.training import Run, tail

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


@dataclass(frozen=True)
class Difference:
    """The distance of FP8's final losses from bf16's, in percent; None in an unfinished run."""

    seed: int
    train_percent: float | None
    heldout_percent: float | None


@dataclass
class Comparison:
    """All runs of one command, in the order they were made."""

    options: Options
    corpus: Corpus
    command: str
    date: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds")
    )
    status: str = "running"
    runs: list[Run] = field(default_factory=list)

    @property
    def json_path(self) -> Path:
        return self.options.out / f"{self.options.name}.json"

    @property
    def png_path(self) -> Path:
        return self.options.out / f"{self.options.name}.png"

    @property
    def parameters(self) -> int:
        return GPT.count_parameters(self.options.model)

    def pairs(self) -> list[tuple[Run, Run]]:
        """(bf16, FP8) of every seed for which both runs were begun."""
        by_key = {(run.seed, run.precision): run for run in self.runs}
        return [
            (run, by_key[run.seed, "fp8"])
            for run in self.runs
            if run.precision == "bf16" and (run.seed, "fp8") in by_key
        ]

    def differences(self) -> list[Difference]:
        """One entry a pair."""
        return [
            Difference(
                seed=bf16.seed,
                train_percent=percent(fp8.train_loss, bf16.train_loss),
                heldout_percent=percent(fp8.heldout_loss, bf16.heldout_loss),
            )
            for bf16, fp8 in self.pairs()
        ]

    def summary(self) -> dict[str, dict[str, float | int]]:
        """Mean and spread of the differences over the seeds that were finished."""
        differences = self.differences()
        columns = {
            "train_percent": [d.train_percent for d in differences],
            "heldout_percent": [d.heldout_percent for d in differences],
        }
        summary: dict[str, dict[str, float | int]] = {}
        for key, column in columns.items():
            values = [value for value in column if value is not None]
            if values:
                spread = stdev(values) if len(values) > 1 else math.nan
                summary[key] = {"mean": fmean(values), "std": spread, "seeds": len(values)}
        return summary

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        options = self.options
        return {
            "status": self.status,
            "command": self.command,
            "date": self.date,
            "versions": versions(),
            "device": describe_device(options.device),
            "config": {
                "preset": options.preset,
                "model": {**asdict(options.model), **options.model.widths},
                "parameters": self.parameters,
                "batch": options.batch,
                "steps": options.steps,
                "tokens_per_step": options.tokens_per_step,
                "lr": options.lr,
                "recipe": options.recipe,
                "wgrad_input": options.wgrad_input,
                "seed": options.seed,
                "seeds": options.seeds,
                "train_loss_is_mean_of_last_steps": tail(options.steps),
            },
            "data": self.corpus.summary(),
            "runs": [asdict(run) for run in self.runs],
            "differences": [asdict(difference) for difference in self.differences()],
            "summary": self.summary(),
        }

    def save(self) -> list[Path]:
        """Write the JSON and the plot, and return where they are.

        Before the first step is done there is nothing to keep, and an earlier result stays.
        """
        if not any(run.losses for run in self.runs):
            return []
        self.options.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(without_nan(self.as_dict()), indent=1, allow_nan=False)
        with replacing(self.json_path) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
        title = (
            f"{self.parameters / 1e6:.3g}M-parameter {self.options.model.kind} "
            f"on the standard library's sources, "
            f"{describe_device(self.options.device)['name']}"
        )
        curves = [Curves(run.seed, run.precision, run.losses) for run in self.runs if run.losses]
        with replacing(self.png_path) as temporary:
            plot_curves(curves, temporary, title=title, steps=self.options.steps)
        return [self.json_path, self.png_path]


def percent(value: float | None, reference: float | None) -> float | None:
    """``value`` against ``reference``, or None while either is missing."""
    if value is None or not reference:
        return None
    return (value / reference - 1) * 100


def describe_device(device: torch.device) -> dict[str, str | int]:
    """The device in words."""
    if device.type == "cuda":
        return {"type": "cuda", "name": torch.cuda.get_device_name(device)}
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return {"type": "cpu", "name": f"CPU, {threads} threads", "threads": threads}
    return {"type": device.type, "name": device.type}


@contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Let an impatient second Ctrl-C not spoil the saving that the first one asked for."""
    # Only the main thread may set handlers, and only it receives the interrupt.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
