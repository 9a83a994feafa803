"""torch.distributed.checkpoint: any number of ranks, converted or not, in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcs
from torch.distributed.device_mesh import DeviceMesh

from blocktensor.distributed import FP8Shard
from tests.support import ranks
from tests.support.ranks import on_ranks
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


@pytest.mark.parametrize(("source", "target"), [(4, 1), (4, 2), (4, 3), (2, 3), (3, 2), (1, 4)])
@on_ranks(4, gpus=())
def test_training_goes_on_with_another_number_of_ranks(
    world: int, device: str, source: int, target: int, tmp_path: Path
) -> None:
    rank, folder = dist.get_rank(), str(tmp_path)
    from_mesh, to_mesh = first_ranks(source), first_ranks(target)
    if rank < source:
        model, optimizer = trained(from_mesh)
        save(model, optimizer, folder, from_mesh)
        saved = snapshot(model, optimizer)
        train(model, optimizer, 2)
        after_step = snapshot(model, optimizer)
    dist.barrier()
    if rank < target:
        model, optimizer = sharded(converted(seed=1), to_mesh)
        if source > target:  # amaxes of other weights are there
            train(model, optimizer, 5)
        load(model, optimizer, folder, to_mesh)
        loaded = snapshot(model, optimizer)
        train(model, optimizer, 2)
        resumed = snapshot(model, optimizer)
    if rank < min(source, target):
        assert_same_tensors(loaded, saved)
        assert_same_tensors(resumed, after_step)


@on_ranks(3, gpus=())
def test_unconverted_models_read_and_write(world: int, device: str, tmp_path: Path) -> None:
    two, three = first_ranks(2), first_ranks(3)
    if dist.get_rank() < 2:
        model, optimizer = trained(two)
        save(model, optimizer, f"{tmp_path}/converted", two)
        wanted = snapshot(model, optimizer)
    dist.barrier()

    model, optimizer = sharded(plain(seed=1), three)
    load(model, optimizer, f"{tmp_path}/converted", three)
    unconverted = snapshot(model, optimizer)
    save(model, optimizer, f"{tmp_path}/plain", three)
    model, optimizer = sharded(converted(seed=1), three)
    load(model, optimizer, f"{tmp_path}/plain", three)
    again = snapshot(model, optimizer)

    assert {type(p._local_tensor) for p in model[::2].parameters() if p.ndim == 2} == {FP8Shard}
    if dist.get_rank() < 2:
        assert_same_tensors(unconverted, wanted)
        assert_same_tensors(again, wanted)


@on_ranks(4, gpus=())
def test_whole_state_dicts_of_rank_0(world: int, device: str, tmp_path: Path) -> None:
    mesh, folder = first_ranks(world), str(tmp_path)
    model, optimizer = trained(mesh)
    save(model, optimizer, folder, mesh)
    saved = snapshot(model, optimizer)
    train(model, optimizer, 2)
    after_step = snapshot(model, optimizer)

    model, optimizer = sharded(converted(seed=1), mesh)
    load(model, optimizer, folder, mesh)
    weights = dcs.get_model_state_dict(model, options=FULL)
    state = dcs.get_optimizer_state_dict(model, optimizer, options=FULL)
    on_rank_0 = {name: value for name, value in saved.items() if ":" not in name}
    assert_same_tensors(weights, {} if dist.get_rank() else on_rank_0)

    model, optimizer = sharded(converted(seed=2), mesh)
    train(model, optimizer, 5)
    dcs.set_model_state_dict(model, weights, options=BROADCAST)
    dcs.set_optimizer_state_dict(model, optimizer, state, options=BROADCAST)
    assert_same_tensors(snapshot(model, optimizer), saved)
    train(model, optimizer, 2)
    assert_same_tensors(snapshot(model, optimizer), after_step)


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
