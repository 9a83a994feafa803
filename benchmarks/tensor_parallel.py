"""A tensor and sequence parallel block of Llama 70B: torch's styles in bf16, ours, and FP8."""

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

QUICK: dict[str, Any] = {"flags": ("--model", "tiny", "--tokens", "512", "--rounds", "2")}
"""The arguments of a smoke run."""

ROOT = Path(__file__).parent.parent
VARIANTS = 4
_TIMEOUT = 300


def total(**_: Any) -> int:
    """How many rows there will be."""
    return VARIANTS


def measure(gpus: int | None = None, flags: Sequence[str] = ()) -> Iterator[Row]:
    """A row a variant. ``gpus``: ranks; default: all GPUs."""
    gpus = torch.cuda.device_count() if gpus is None else gpus
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    worker = ["--nproc-per-node", str(gpus), "-m", "benchmarks.tensor_parallel_worker", *flags]
    paths = [str(ROOT), str(ROOT / "examples"), *sys.path]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        done = subprocess.run(
            [*launcher, *worker, "--out", str(out)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(worker)} failed:\n{done.stdout}\n{done.stderr}")
        yield from json.loads(out.read_text())
