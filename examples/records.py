"""Writing a comparison down: what was run, where, and what came out."""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from gpt import GPT
from options import Options
from plot import Curves, plot_curves
from text import Corpus
from training import Run, tail
from writing import replacing, versions, without_nan


@dataclass(frozen=True)
class Difference:
    """How far FP8's final losses lie from bf16's, in percent; None while a run is unfinished."""

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
        """What the JSON file holds."""
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
