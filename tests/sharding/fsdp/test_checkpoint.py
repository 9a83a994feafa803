"""torch.distributed.checkpoint: any number of ranks, converted or not, in place, after kill -9."""

from __future__ import annotations

import random
import re
import shutil
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcs
from torch.distributed.device_mesh import DeviceMesh

from blocktensor.sharding.fsdp.shards import FP8Shard
from tests.support import ranks
from tests.support.ranks import on_ranks
from tests.support.sharded import local_kinds, mesh_of
from tests.support.sharded_checkpoints import (
    assert_forward_is_fresh,
    assert_same_tensors,
    converted,
    first_ranks,
    load,
    loss_of,
    plain,
    save,
    sharded,
    snapshot,
    train,
    trained,
    weights_of,
)

FULL = dcs.StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = dcs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def go_on(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    now = snapshot(model, optimizer)
    train(model, optimizer, 2)
    return [now, snapshot(model, optimizer)]


@pytest.mark.parametrize(("source", "target"), [(4, 1), (4, 2), (4, 3), (2, 3), (3, 2), (1, 4)])
@on_ranks(4, gpus=())
def test_training_goes_on_with_another_number_of_ranks(
    source: int, target: int, tmp_path: Path
) -> None:
    rank, from_mesh, to_mesh = dist.get_rank(), first_ranks(source), first_ranks(target)
    wanted = resumed = []
    if rank < source:
        model, optimizer = trained(from_mesh)
        save(model, optimizer, tmp_path, from_mesh)
        wanted = go_on(model, optimizer)
    dist.barrier()
    if rank < target:
        model, optimizer = sharded(converted(seed=1), to_mesh)
        if source > target:  # amaxes of other weights are there
            train(model, optimizer, 5)
        load(model, optimizer, tmp_path, to_mesh)
        resumed = go_on(model, optimizer)
    if rank < min(source, target):
        for found, want in zip(resumed, wanted, strict=True):
            assert_same_tensors(found, want)


@on_ranks(3, gpus=())
def test_unconverted_models_read_and_write(tmp_path: Path) -> None:
    two, three = first_ranks(2), first_ranks(3)
    if dist.get_rank() < 2:
        model, optimizer = trained(two)
        save(model, optimizer, tmp_path / "converted", two)
        wanted = snapshot(model, optimizer)
    dist.barrier()

    model, optimizer = sharded(plain(seed=1), three)
    load(model, optimizer, tmp_path / "converted", three)
    unconverted = snapshot(model, optimizer)
    save(model, optimizer, tmp_path / "plain", three)
    model, optimizer = sharded(converted(seed=1), three)
    load(model, optimizer, tmp_path / "plain", three)
    again = snapshot(model, optimizer)

    assert local_kinds(nn.ParameterList(layer.weight for layer in model[::2])) == {FP8Shard}
    for found in (unconverted, again) if dist.get_rank() < 2 else ():
        assert_same_tensors(found, wanted)


@on_ranks(4, gpus=())
def test_whole_state_dicts_of_rank_0(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, optimizer = trained(mesh)
    save(model, optimizer, tmp_path, mesh)
    wanted = go_on(model, optimizer)

    model, optimizer = sharded(converted(seed=1), mesh)
    load(model, optimizer, tmp_path, mesh)
    weights = dcs.get_model_state_dict(model, options=FULL)
    state = dcs.get_optimizer_state_dict(model, optimizer, options=FULL)
    on_rank_0 = {name: value for name, value in wanted[0].items() if ":" not in name}
    assert_same_tensors(weights, {} if dist.get_rank() else on_rank_0)

    model, optimizer = sharded(converted(seed=2), mesh)
    train(model, optimizer, 5)
    dcs.set_model_state_dict(model, weights, options=BROADCAST)
    dcs.set_optimizer_state_dict(model, optimizer, state, options=BROADCAST)
    for found, want in zip(go_on(model, optimizer), wanted, strict=True):
        assert_same_tensors(found, want)


def _save(folder: Path) -> dict[str, Tensor]:
    model, optimizer = trained(mesh_of(3, "cpu"))
    save(model, optimizer, folder)
    return weights_of(model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_reads_in_place_what_ranks_wrote(tmp_path: Path) -> None:
    wanted = ranks.call_on_ranks(3, "cpu", _save, tmp_path)[0]
    for make in (plain, converted):
        model = make(seed=1)
        loss_of(model, 0)
        dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
        assert_same_tensors(dict(model.state_dict()), wanted)
    assert_forward_is_fresh(model)


# Training that is killed, whole or one rank of it, resumes bit for bit

STEPS, KILLS = 8, 4
TIMEOUT = timedelta(seconds=20)
"""Of a collective in which a rank is missing."""

LOST = {"cpu": "by peer|remote worker", "cuda": "Watchdog caught collective operation timeout"}
"""What a rank says that waits for one that died."""


def steps_in(folder: Path) -> int:
    return max((int(path.suffix[1:]) for path in folder.glob("step.*")), default=0)


def _train(folder: Path, device: str) -> dict[str, Tensor]:
    """Train from the last whole checkpoint on, saving every step; what comes of it."""
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True)
    mesh, rank = mesh_of(2, device), dist.get_rank()
    model, optimizer = sharded(converted().to(device), mesh)
    losses = torch.zeros(STEPS)
    done = steps_in(folder)
    dist.barrier()
    if done:
        dcp.load({"losses": losses}, checkpoint_id=folder / f"step.{done}")
        load(model, optimizer, str(folder / f"step.{done}"), mesh)
    Path(folder, f"began.{rank}").touch()
    for step in range(done, STEPS):
        losses[step] = train(model, optimizer, step)
        unfinished = folder / f"unfinished.{step + 1}"
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier()
        weights, moments = dcs.get_state_dict(model, optimizer)
        whole = {"model": weights, "optimizer": moments, "losses": losses}
        dcp.save(whole, checkpoint_id=unfinished)
        if rank == 0:
            unfinished.rename(folder / f"step.{step + 1}")
            shutil.rmtree(folder / f"step.{step - 1}", ignore_errors=True)
    found = {name: t.cpu() for name, t in snapshot(model, optimizer).items()}
    return found | {"losses": losses}


def _begun(folder: Path, device: str, steps: int) -> Any:
    """Two ranks that have begun to train, and whose last checkpoint is of so many steps."""
    for path in folder.glob("began.*"):
        path.unlink()
    group = ranks._Group(2, device, timeout=TIMEOUT)
    group.begin(_train, folder, device)
    deadline = time.monotonic() + 60
    while len([*folder.glob("began.*")]) < 2 or steps_in(folder) < steps:
        assert time.monotonic() < deadline
        if any(pipe.poll() for pipe in group._pipes):
            group.answers()  # raises what they have raised
        time.sleep(0.005)
    return group


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def test_what_is_killed_resumes_bit_for_bit(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank alone, which ends the other; on the CPU then both, soon after they began."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    wanted, _ = ranks.call_on_ranks(2, device, _train, whole, device)
    assert wanted["losses"].isfinite().all() and wanted["losses"][-1] < wanted["losses"][0]

    monkeypatch.setattr(ranks, "_GRACE", TIMEOUT.total_seconds() + 60)
    moments = random.Random(0)
    for kill in range(KILLS if device == "cpu" else 1):
        group = _begun(killed, device, steps=int(kill == 0))
        time.sleep(moments.uniform(0, 0.12))
        for process in group._processes[:: 1 if kill % 2 else -1][: 2 if kill else 1]:
            process.kill()
        if kill == 0:
            with pytest.raises(RuntimeError, match=r"(?s)rank 0:.*rank 1:\nthe process died") as e:
                group.answers()
            said = ranks._stderr(group._folder.name, 0).read_text(errors="replace")
            assert re.search(LOST[device], said + str(e.value))
        group.close()
    assert steps_in(killed) < STEPS, "killed too late to interrupt much"
    found, _ = ranks.call_on_ranks(2, device, _train, killed, device)
    assert_same_tensors(found, wanted)
