"""Run a function on several ranks: processes that talk through gloo, or NCCL where asked."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 240
"""Seconds that a test's ranks may take, their imports on two busy cores included."""


def _rank(
    rank: int, world: int, backend: str, folder: str, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    where = Path(folder)
    try:
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=rank, world_size=world
        )
        torch.save(function(rank, world, *args), where / f"result.{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (where / f"error.{rank}").write_text(traceback.format_exc())
        os._exit(1)  # the others may wait for this one: nothing to clean up


def run(function: Callable[..., Any], world: int, *args: Any, backend: str = "gloo") -> list[Any]:
    """``function(rank, world, *args)`` on every rank; what each returned, in order.

    Raises:
        RuntimeError: with the traceback of each rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [
            context.Process(target=_rank, args=(rank, world, backend, folder, function, args))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(TIMEOUT)
        stuck = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
        errors = [
            f"rank {path.suffix[1:]}:\n{path.read_text()}"
            for path in sorted(Path(folder).glob("error.*"))
        ]
        if stuck or errors:
            raise RuntimeError(
                "\n".join([*errors, f"ranks that hung: {stuck}"] if stuck else errors)
            )
        results = [Path(folder) / f"result.{rank}" for rank in range(world)]
        return [torch.load(path, weights_only=False) for path in results]
