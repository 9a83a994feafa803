"""Sharded training that is killed with kill -9 resumes bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcs
from torch.distributed.device_mesh import DeviceMesh

from tests.support.ranks import forking
from tests.support.sharded_checkpoints import (
    assert_same_tensors,
    converted,
    load,
    sharded,
    snapshot,
    train,
)

STEPS = 50
KILLS = 10


def _train(rank: int, world: int, folder: str, store: str) -> None:
    """Train from the last whole checkpoint on, saving every step."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = DeviceMesh("cpu", list(range(world)))
    where = Path(folder)
    model, optimizer = sharded(converted(), mesh)
    losses = torch.zeros(STEPS)
    done = max((int(path.suffix[1:]) for path in where.glob("step.*")), default=0)
    dist.barrier()
    if done:
        state: dict[str, Any] = {"losses": losses}
        dcp.load(state, checkpoint_id=where / f"step.{done}")
        load(model, optimizer, str(where / f"step.{done}"), mesh)
    Path(f"{store}.{rank}").touch()
    for step in range(done, STEPS):
        losses[step] = train(model, optimizer, step)
        unfinished = where / f"unfinished.{step + 1}"
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier()
        weights, moments = dcs.get_state_dict(model, optimizer)
        whole = {"model": weights, "optimizer": moments, "losses": losses}
        dcp.save(whole, checkpoint_id=unfinished)
        if rank == 0:
            unfinished.rename(where / f"step.{step + 1}")
            shutil.rmtree(where / f"step.{step - 1}", ignore_errors=True)
    found = {**snapshot(model, optimizer), "losses": losses}
    dist.barrier()
    if rank == 0:
        torch.save(found, where / "end.unfinished")
        (where / "end.unfinished").rename(where / "end")
    dist.barrier()
    dist.destroy_process_group()


def _launch(folder: Path, attempt: int, kill_after: float | None) -> None:
    """Two ranks; killed so long after the last of them began to train."""
    context = forking()
    store = folder / f"store.{attempt}"
    processes: list[Any] = [
        context.Process(target=_train, args=(rank, 2, str(folder), str(store))) for rank in range(2)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 60
    try:
        if kill_after is None:
            for process in processes:
                process.join(deadline - time.monotonic())
            assert [process.exitcode for process in processes] == [0, 0]
        else:
            while not all(Path(f"{store}.{rank}").exists() for rank in range(2)):
                assert time.monotonic() < deadline
                assert all(process.exitcode in (None, 0) for process in processes)
                time.sleep(0.005)
            time.sleep(kill_after)
    finally:
        for process in processes[:: 1 if attempt % 2 else -1]:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join(10)


@pytest.mark.slow
def test_what_is_killed_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    _launch(whole, 0, kill_after=None)
    moments = random.Random(0)
    kills = 0
    while not (killed / "end").exists():
        kills += 1
        _launch(killed, kills, moments.uniform(0, 0.12) if kills <= KILLS else None)
    assert kills > KILLS // 2, "killed too late to interrupt much"
    wanted, found = (torch.load(folder / "end", weights_only=True) for folder in (whole, killed))
    assert wanted["losses"].isfinite().all() and wanted["losses"][-1] < wanted["losses"][0]
    assert_same_tensors(found, wanted)
