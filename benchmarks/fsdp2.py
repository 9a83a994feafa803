"""Llama under FSDP2, by ``examples/fsdp2_llama.py``: on the GPUs there are, and dry runs of more.

A dry run is one process as rank 0 of many, with nothing sent: its peak memory is that of the real
rank, to the byte, and its speed what it would be if communication cost nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .results import Row

GPUS = 2
"""How many it needs."""

QUICK: dict[str, Any] = {
    "flags": ("--model", "tiny", "--layers", "1", "--seq", "32", "--batch", "1", "--vocab", "51"),
    "steps": (3, 1),
    "dry": (2,),
}
"""The arguments of a smoke run."""

ROOT = Path(__file__).parent.parent
FLAGS = ("--model", "8b", "--seq", "8192", "--batch", "1", "--compile")
STEPS = (14, 4)
"""Steps, and how many of them warm up."""

DRY = (4, 8)
VARIANTS: dict[str, Sequence[str]] = {
    "bf16": ("--precision", "bf16"),
    "fp8": ("--precision", "fp8"),
    "fp8, gathered in bf16": ("--precision", "fp8", "--gather", "bf16"),
    "fp8, wgrad_input=128x128, fused, head in fp8": (
        *("--precision", "fp8", "--wgrad-input", "128x128", "--fuse"),
        *("--head", "fp8", "--loss-chunk", "4096"),
    ),
}

_TIMEOUT = 900


def commands(
    gpus: int, flags: Sequence[str], steps: tuple[int, int], dry: Sequence[int]
) -> list[tuple[str, bool, list[str]]]:
    """The variant, whether it is a dry run, and the words of its command, but for ``--out``."""
    counts = ["--steps", str(steps[0]), "--warmup-steps", str(steps[1])]
    script = ["examples/fsdp2_llama.py", *flags, *counts]
    real = ["torchrun", "--standalone", "--nproc-per-node", str(gpus), *script]
    found = [(name, False, [*real, *more]) for name, more in VARIANTS.items()]
    for ranks in dry:
        pretended = ["python", *script, "--fake-ranks", str(ranks)]
        found += [(name, True, [*pretended, *VARIANTS[name]]) for name in ("bf16", "fp8")]
    return found


def total(gpus: int | None = None, dry: Sequence[int] = DRY, **_: Any) -> int:
    """How many rows there will be."""
    return len(commands(torch.cuda.device_count() if gpus is None else gpus, (), STEPS, dry))


def measure(
    gpus: int | None = None,
    flags: Sequence[str] = FLAGS,
    steps: tuple[int, int] = STEPS,
    dry: Sequence[int] = DRY,
) -> Iterator[Row]:
    """A row a run. ``gpus``: processes; default: all GPUs."""
    gpus = torch.cuda.device_count() if gpus is None else gpus
    rows: list[Row] = []
    for variant, is_dry, words in commands(gpus, flags, steps, dry):
        rows.append(compared(row_of(variant, is_dry, words, _run(words)), rows))
        yield rows[-1]


def _run(words: Sequence[str]) -> dict[str, Any]:
    """What the example writes down."""
    launchers = {"torchrun": ["-m", "torch.distributed.run"], "python": []}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *launchers[words[0]], *words[1:], "--out", folder],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} failed:\n{done.stdout}\n{done.stderr}")
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return found


def row_of(variant: str, is_dry: bool, words: Sequence[str], result: dict[str, Any]) -> Row:
    """A run's numbers."""
    memory = result["max_memory_allocated"]
    return {
        "variant": variant,
        "mode": "dry run" if is_dry else "run",
        "ranks": result["world_size"],
        "parameters": result["model"]["parameters"],
        "tokens_per_second_per_gpu": round(result["tokens_per_second_per_gpu"], 1),
        "mfu": round(result["mfu"], 4),
        "peak_mib": None if memory is None else round(memory / 2**20, 1),
        "command": " ".join(words),
    }


def compared(row: Row, others: Sequence[Row]) -> Row:
    """The row with its speed and peak over those of other variants on as many ranks."""
    speed, peak = "tokens_per_second_per_gpu", "peak_mib"
    beside = {r["variant"]: r for r in (*others, row) if _setting(r) == _setting(row)}
    made = {**row, "speed_of_bf16": round(row[speed] / beside["bf16"][speed], 4)}
    if row["variant"] not in ("bf16", "fp8"):
        made["speed_of_fp8"] = round(row[speed] / beside["fp8"][speed], 4)
    if row[peak]:
        made["peak_of_bf16"] = round(row[peak] / beside["bf16"][peak], 4)
    return made


def _setting(row: Row) -> tuple[str, int]:
    return row["mode"], row["ranks"]
