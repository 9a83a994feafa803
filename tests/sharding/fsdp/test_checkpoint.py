"""torch.distributed.checkpoint: any number of ranks, converted or not, in place, after kill -9."""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from blocktensor.distributed import FP8Shard
from tests.support import ranks
from tests.support.ranks import forking, on_ranks
from tests.support.sharded_checkpoints import (
    assert_forward_is_fresh,
    assert_same_tensors,
    converted,
    load,
    loss_of,
    plain,
    save,
    sharded,
    snapshot,
    train,
    trained,
)

FULL = dcs.StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = dcs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def first_ranks(count: int) -> DeviceMesh:
    """A mesh of the first ranks; all ranks must ask."""
    return DeviceMesh("cpu", list(range(count)))


def go_on(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """Return all values now, and after one more step."""
    now = snapshot(model, optimizer)
    train(model, optimizer, 2)
    return [now, snapshot(model, optimizer)]


@pytest.mark.parametrize(("source", "target"), [(4, 1), (4, 2), (4, 3), (2, 3), (3, 2), (1, 4)])
@on_ranks(4, gpus=())
def test_training_goes_on_with_another_number_of_ranks(
    world: int, device: str, source: int, target: int, tmp_path: Path
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
def test_unconverted_models_read_and_write(world: int, device: str, tmp_path: Path) -> None:
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

    assert {type(p._local_tensor) for p in model[::2].parameters() if p.ndim == 2} == {FP8Shard}
    for found in (unconverted, again) if dist.get_rank() < 2 else ():
        assert_same_tensors(found, wanted)


@on_ranks(4, gpus=())
def test_whole_state_dicts_of_rank_0(world: int, device: str, tmp_path: Path) -> None:
    """They are gathered there, and sent out from there."""
    mesh = first_ranks(world)
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


def _save_from_1_2_3_and_4_ranks(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    """Save the same training on so many ranks; its weights."""
    for count in range(1, world + 1):
        mesh = first_ranks(count)
        if rank < count:
            model, optimizer = trained(mesh)
            save(model, optimizer, f"{folder}/{count}", mesh)
    found = snapshot(model, optimizer)
    return {name: value for name, value in found.items() if ":" not in name}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_reads_in_place_what_ranks_wrote(tmp_path: Path) -> None:
    wanted = ranks.run(_save_from_1_2_3_and_4_ranks, 4, str(tmp_path))[0]
    for make in (plain, converted):
        for count in range(1, 5):
            model = make(seed=1)
            loss_of(model, 0)
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=tmp_path / str(count), no_dist=True)
            assert_same_tensors(dict(model.state_dict()), wanted)
            if make is converted:
                assert_forward_is_fresh(model)


# Training that is killed, whole or one rank of it, resumes bit for bit


STEPS = 24
KILLS = 5
TIMEOUT = timedelta(seconds=20)
"""Of a collective in which a rank is missing."""

LOST = {"cpu": "by peer|remote worker", "cuda": "Watchdog caught collective operation timeout"}
"""What a rank says that waits for one that died."""


def _train(rank: int, world: int, folder: str, store: str, device: str) -> None:
    """Train from the last whole checkpoint on, saving every step; stderr goes to a file."""
    with Path(f"{store}.{rank}.stderr").open("wb") as file:
        os.dup2(file.fileno(), 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if device == "cuda":
        torch.cuda.set_device(rank)
        # torch waits four times as long between the error and the end of the process
        os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=TIMEOUT,
    )
    mesh, where = DeviceMesh(device, list(range(world))), Path(folder)
    model, optimizer = sharded(converted().to(device), mesh)
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
    found = {name: t.cpu() for name, t in snapshot(model, optimizer).items()}
    found["losses"] = losses
    dist.barrier()
    if rank == 0:
        torch.save(found, where / "end.unfinished")
        (where / "end.unfinished").rename(where / "end")
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _started(folder: Path, attempt: int, device: str = "cpu") -> Iterator[list[Any]]:
    """Two ranks that train, killed in the end if they still do."""
    folder.mkdir(exist_ok=True)
    arguments = str(folder), str(folder / f"store.{attempt}"), device
    processes = [forking().Process(target=_train, args=(rank, 2, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes[:: 1 if attempt % 2 else -1]:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join(10)


def _wait(processes: list[Any], until: Callable[[], bool]) -> None:
    """For something that processes do before they end, at most a minute."""
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline
        assert all(process.exitcode in (None, 0) for process in processes)
        time.sleep(0.005)


def _finish(folder: Path, attempt: int, device: str = "cpu") -> dict[str, Tensor]:
    """Train to the end; what came of it."""
    with _started(folder, attempt, device) as processes:
        deadline = time.monotonic() + 60
        for process in processes:
            process.join(deadline - time.monotonic())
        assert [process.exitcode for process in processes] == [0, 0]
    found: dict[str, Tensor] = torch.load(folder / "end", weights_only=True)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Tensor]]:
    """What comes of a training that nobody kills, on a device."""
    return functools.cache(lambda device: _finish(tmp_path_factory.mktemp("whole"), 0, device))


@pytest.mark.slow
def test_what_is_killed_resumes_bit_for_bit(tmp_path: Path, whole: Any) -> None:
    killed, moments, kills, wanted = tmp_path / "killed", random.Random(0), 0, whole("cpu")
    while kills < KILLS and not (killed / "end").exists():
        kills += 1
        began = [killed / f"store.{kills}.{rank}" for rank in range(2)]
        with _started(killed, kills) as processes:  # and kill both, soon after they began to train
            _wait(processes, lambda: all(path.exists() for path in began))  # noqa: B023
            time.sleep(moments.uniform(0, 0.12))
    assert kills > KILLS // 2, "killed too late to interrupt much"
    found = _finish(killed, kills + 1)
    assert wanted["losses"].isfinite().all() and wanted["losses"][-1] < wanted["losses"][0]
    assert_same_tensors(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def test_a_rank_that_dies_ends_the_other(device: str, tmp_path: Path, whole: Any) -> None:
    killed, wanted = tmp_path / "killed", whole(device)
    with _started(killed, 0, device) as processes:
        _wait(processes, lambda: any(killed.glob("step.*")))
        os.kill(processes[1].pid, signal.SIGKILL)
        processes[0].join(TIMEOUT.total_seconds() + 60)
        said = (killed / "store.0.0.stderr").read_text(errors="replace")
        assert processes[0].exitcode not in (None, 0), said
    assert re.search(LOST[device], said)
    assert not (killed / "end").exists()
    assert_same_tensors(_finish(killed, 1, device), wanted)
