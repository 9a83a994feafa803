"""Llama under FSDP2, by ``examples/fsdp2_llama.py``: on the GPUs there are, and dry runs of more.

A dry run is one process as rank 0 of many, with nothing sent: its peak memory is that of the real
rank, to the byte, and its speed what it would be if communication cost nothing. Of runs with one
microbatch a step, the last step is traced: where its time goes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import profiled
from .ranks import run_to_end
from .results import Row

GPUS = 2
"""The number of GPUs it needs."""

QUICK: dict[str, Any] = {
    "flags": ("--model", "tiny", "--layers", "1", "--seq", "32", "--batch", "1", "--vocab", "51"),
    "steps": {1: (4, 1), 2: (3, 1)},
    "dry": (2,),
}
"""The arguments of a smoke run."""

FLAGS = ("--model", "8b", "--seq", "8192", "--batch", "1", "--compile")
STEPS = {1: (15, 4), 16: (4, 2)}
"""By microbatches a step: steps, and how many of them warm up."""

DRY = (4, 8)
_FUSED = ("--fuse", "--head", "fp8")
VARIANTS: dict[str, Sequence[str]] = {
    "bf16": ("--precision", "bf16"),
    "fp8": ("--precision", "fp8"),
    "fp8, gathered in bf16": ("--precision", "fp8", "--gather", "bf16"),
    "fp8, fused, head in fp8": ("--precision", "fp8", *_FUSED),
    "fp8, fused, head in fp8, wgrad_input=1x128": (
        "--precision",
        "fp8",
        "--wgrad-input",
        "1x128",
        *_FUSED,
    ),
}
ACCUMULATED: dict[str, Sequence[str]] = {
    "bf16": VARIANTS["bf16"],
    "fp8, fused, head in fp8": VARIANTS["fp8, fused, head in fp8"],
    "fp8, fused, head in fp8, gathered once": (
        *VARIANTS["fp8, fused, head in fp8"],
        "--no-reshard-after-forward",
    ),
}
"""With several microbatches a step. bf16 weights gathered once do not fit beside fp32 gradients."""

_TIMEOUT = 900


class Run(NamedTuple):
    """A run of the example: its variant, and the words of its command but for files it writes."""

    variant: str
    microbatches: int
    is_dry: bool
    words: list[str]


def runs(
    gpus: int, flags: Sequence[str], steps: Mapping[int, tuple[int, int]], dry: Sequence[int]
) -> list[Run]:
    """All runs, in order."""
    made: list[Run] = []
    for count, (all_steps, warmup) in steps.items():
        counts = ["--steps", str(all_steps), "--warmup-steps", str(warmup)]
        counts += ["--accumulate", str(count)] if count > 1 else []
        script = ["examples/fsdp2_llama.py", *flags, *counts]
        real = ["torchrun", "--standalone", "--nproc-per-node", str(gpus), *script]
        variants = VARIANTS if count == 1 else ACCUMULATED
        made += [Run(name, count, False, [*real, *more]) for name, more in variants.items()]
        if count == 1:
            for ranks in dry:
                pretended = ["python", *script, "--fake-ranks", str(ranks)]
                for name in ("bf16", "fp8"):
                    made.append(Run(name, 1, True, [*pretended, *VARIANTS[name]]))
    return made


def measure(
    gpus: int | None = None,
    flags: Sequence[str] = FLAGS,
    steps: Mapping[int, tuple[int, int]] = STEPS,
    dry: Sequence[int] = DRY,
) -> Iterator[Row]:
    """A row a run. ``gpus``: processes; default: all GPUs."""
    gpus = torch.cuda.device_count() if gpus is None else gpus
    rows: list[Row] = []
    for run in runs(gpus, flags, steps, dry):
        rows.append(compared(row_of(run, *_written(run)), rows))
        yield rows[-1]


def _written(run: Run) -> tuple[dict[str, Any], dict[str, float]]:
    """Run the example; return its result, and milliseconds of its traced step by part."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        is_traced = run.microbatches == 1 and not run.is_dry
        files = ["--out", folder, *(["--trace", str(trace)] if is_traced else [])]
        run_to_end([*run.words, *files], _TIMEOUT)
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        if not is_traced:
            return found, {}
        return found, profiled.parts_of(profiled.last_step(profiled.kernels(trace)))


def row_of(run: Run, result: Mapping[str, Any], parts: Mapping[str, float]) -> Row:
    """A run's numbers."""
    memory = result["max_memory_allocated"]
    return {
        "variant": run.variant,
        "mode": "dry run" if run.is_dry else "run",
        "ranks": result["world_size"],
        "microbatches": run.microbatches,
        "parameters": result["model"]["parameters"],
        "tokens_per_second_per_gpu": round(result["tokens_per_second_per_gpu"], 1),
        "mfu": round(result["mfu"], 4),
        "peak_mib": None if memory is None else round(memory / 2**20, 1),
        "step_ms": round(result["step_seconds"] * 1e3, 1),
        **{f"{part}_ms": round(ms, 1) for part, ms in parts.items()},
        "command": " ".join(run.words),
    }


def compared(row: Row, others: Sequence[Row]) -> Row:
    """The row with its speed and peak over those of other variants in the same setting."""
    speed, peak = "tokens_per_second_per_gpu", "peak_mib"
    beside = {r["variant"]: r for r in (*others, row) if _setting(r) == _setting(row)}
    made = {**row, "speed_of_bf16": round(row[speed] / beside["bf16"][speed], 4)}
    if row["variant"] not in ("bf16", "fp8") and "fp8" in beside:
        made["speed_of_fp8"] = round(row[speed] / beside["fp8"][speed], 4)
    if row[peak]:
        made["peak_of_bf16"] = round(row[peak] / beside["bf16"][peak], 4)
    return made


def _setting(row: Row) -> tuple[str, int, int]:
    return row["mode"], row["ranks"], row["microbatches"]
