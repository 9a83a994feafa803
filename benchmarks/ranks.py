"""Benchmarks whose worker runs on several GPUs: torchrun starts it, every rank is timed."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .results import Row
from .timing import Call

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class OnRanks:
    """A benchmark whose module ``benchmarks.<name>`` torchrun runs on several GPUs."""

    name: str
    QUICK: dict[str, Any]
    """The arguments of a smoke run."""
    GPUS: int = 2
    """The GPUs that it needs."""

    one_by_one: tuple[str, ...] = ()
    """Variants of which each has a run of its own, as models of two do not fit; bf16 first."""
    timeout: float = 300
    """Seconds of a run."""

    def measure(self, gpus: int | None = None, flags: Sequence[str] = ()) -> Iterator[Row]:
        """Yield the rows that rank 0 writes. ``gpus``: ranks; default: all GPUs."""
        gpus = torch.cuda.device_count() if gpus is None else gpus
        if not self.one_by_one:
            yield from self._rows(gpus, flags)
            return
        bf16: Row = {}
        for name in self.one_by_one:
            (row,) = self._rows(gpus, ["--variant", name, *flags])
            bf16 = bf16 or row
            row["speed_of_bf16"] = round(bf16["step_ms"] / row["step_ms"], 4)
            row["peak_of_bf16"] = round(row["peak_mib"] / bf16["peak_mib"], 4)
            yield row

    def _rows(self, gpus: int, flags: Sequence[str]) -> list[Row]:
        count = ["--standalone", "--nproc-per-node", str(gpus)]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "rows.json")
            words = ["torchrun", *count, "-m", f"benchmarks.{self.name}", *flags]
            run_to_end([*words, "--out", str(out)], self.timeout)
            rows: list[Row] = json.loads(out.read_text())
            return rows


def _tiny(*flags: str) -> dict[str, Any]:
    return {"flags": ("--model", "tiny", *flags, "--rounds", "2")}


TENSOR_PARALLEL = OnRanks("tensor_parallel", _tiny("--tokens", "512"))
EXPERT_PARALLEL = OnRanks("expert_parallel", _tiny("--tokens", "512", "--layers", "1"))
CONTEXT_PARALLEL = OnRanks("context_parallel", _tiny("--tokens", "512", "--layers", "1"))
ONE_BY_ONE = "bf16", "fp8", "fp8, fused", "fp8, fused, head in fp8"
QWEN3 = OnRanks(
    "qwen3", _tiny("--tokens", "64", "--steps", "4"), one_by_one=ONE_BY_ONE, timeout=900
)


def run_to_end(words: Sequence[str], timeout: float) -> None:
    """Run a command that begins with ``torchrun`` or ``python``, in the project's folder.

    Raises:
        RuntimeError: it fails; with what it printed.
    """
    launchers = {"torchrun": ["-m", "torch.distributed.run"], "python": []}
    paths = [str(ROOT), str(ROOT / "examples"), *sys.path]
    done = subprocess.run(
        [sys.executable, *launchers[words[0]], *words[1:]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stdout}\n{done.stderr}")


def parser(
    description: str | None, models: Sequence[str], tokens: int = 8192
) -> argparse.ArgumentParser:
    """The command line of a worker; the first of ``models`` is the default."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--model", choices=tuple(models), default=models[0])
    made.add_argument("--tokens", type=int, default=tokens)
    made.add_argument("--rounds", type=int, default=8)
    made.add_argument("--out", type=Path, required=True)
    return made


def run_worker(out: Path, rows: Callable[[DeviceMesh], list[Row]]) -> None:
    """A rank of torchrun's group: measure, and let rank 0 write the rows down."""
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does; docs/faq.md
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    made = rows(init_device_mesh("cuda", (dist.get_world_size(),)))
    if rank == 0:
        out.write_text(json.dumps(made))
    dist.barrier()
    dist.destroy_process_group()


def in_turn(found: Mapping[str, Call], rounds: int, repeats: int = 4) -> dict[str, float]:
    """Milliseconds a call, after three to warm up; ranks make the same calls in the same order."""
    for call in found.values():
        for _ in range(3):
            call()
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, call in found.items():
            call()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / repeats)
    return {name: median(values) for name, values in times.items()}
