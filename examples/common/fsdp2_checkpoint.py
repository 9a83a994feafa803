"""Checkpoints of a sharded run that a kill at any moment cannot spoil."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.optim import Optimizer

RECORD = "run.json"
"""A file next to torch's: what the losses depend on, and the losses so far."""


def _complete(folder: Path) -> dict[int, Path]:
    """Complete checkpoints by step."""
    found = {}
    for path in folder.glob("step-*"):
        named = re.fullmatch(r"step-(\d+)", path.name)
        # torch writes its metadata last
        if named and (path / ".metadata").is_file() and (path / RECORD).is_file():
            found[int(named[1])] = path
    return found


def save(
    folder: Path, step: int, model: nn.Module, optimizer: Optimizer, record: dict[str, Any]
) -> None:
    """Write one checkpoint; it has its name only once all ranks have written all of it."""
    path, temporary = folder / f"step-{step:08d}", folder / f".step-{step:08d}.tmp"
    first = dist.get_rank() == 0
    if first:
        # of runs that were killed; ``path`` is one too: what is complete was resumed from
        for leftover in (path, *folder.glob(".step-*.tmp")):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        (temporary / RECORD).write_text(json.dumps(record) + "\n")
    dist.barrier()
    weights, state = get_state_dict(model, optimizer)
    save_state({"model": weights, "optimizer": state}, checkpoint_id=temporary)
    dist.barrier()
    if first:
        os.replace(temporary, path)
    dist.barrier()


def resume(
    folder: Path, model: nn.Module, optimizer: Optimizer, setting: dict[str, Any]
) -> dict[str, Any] | None:
    """Load the newest complete checkpoint, if there is one, and return its record.

    Raises:
        SystemExit: it is of a run with another ``setting``.
    """
    newest: list[Any] = [None]
    if dist.get_rank() == 0:  # one answer for all: a folder may look different elsewhere
        complete = _complete(folder)
        if complete:
            path = complete[max(complete)]
            newest = [(path, json.loads((path / RECORD).read_text()))]
    dist.broadcast_object_list(newest, src=0)
    if newest[0] is None:
        return None
    path, record = newest[0]
    for key, value in setting.items():
        if record["setting"].get(key) != value:
            raise SystemExit(
                f"{path} was made with {key} {record['setting'].get(key)}, this run has {value}: "
                f"give the same, or another --checkpoint DIR"
            )
    weights, state = get_state_dict(model, optimizer)
    load_state({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return dict(record)
