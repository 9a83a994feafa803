"""What FSDP2 does to parameters: which changes a forward sees, and which are none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from blocktensor import convert
from blocktensor.sharding.fsdp.shards import FP8Shard
from tests.support.models import randn
from tests.support.ranks import on_ranks
from tests.support.sharded import assert_equal, scale, shard_of, step, whole
from tests.support.sharded_checkpoints import (
    Averaged,
    assert_forward_is_fresh,
    assert_same_tensors,
    converted,
    load,
    loss_of,
    sharded,
    snapshot,
    table_of,
    train,
    trained,
)

WRITES: tuple[Callable[[Tensor], Any], ...] = (
    lambda p: p.detach().to_local().mul_(8),
    lambda p: setattr(shard_of(p).master, "data", shard_of(p).master * 8),
    # PyTorch does not count these
    lambda p: p.to_local().view(-1).data.mul_(8),
    lambda p: p._local_tensor.master.view(torch.int16).numpy().__iadd__(3 << 7),
)
"""More: ``test_amax_table.py``."""


@on_ranks(3, gpus=())
def test_writes_through_aliases(mesh: DeviceMesh) -> None:
    model, _ = trained(mesh)
    for write in WRITES:
        for layer in (0, 4):
            with torch.no_grad():
                write(model[layer].weight)
            assert_forward_is_fresh(model)
    for rank in range(3):
        if dist.get_rank() == rank:
            with torch.no_grad():
                model[0].weight.to_local().mul_(8)
                model[2].weight.to_local().data.mul_(8)
        assert_forward_is_fresh(model)
    model, _ = trained(mesh)
    with torch.inference_mode():  # PyTorch counts no writes to such tensors
        model.half().bfloat16()
        assert_forward_is_fresh(model)
        model[2].weight.mul_(8)
        assert_forward_is_fresh(model)


@on_ranks(3, gpus=())
def test_loads_in_place(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, _ = trained(mesh)
    larger = {name: value * 64 for name, value in model.state_dict().items()}
    dcp.save(larger, checkpoint_id=tmp_path)
    for names in (["4.weight"], ["2.weight"], ["0.bias"], ["0.weight"], list(larger)):
        assert_forward_is_fresh(model)
        state = model.state_dict()
        dcp.load({name: state[name] for name in names}, checkpoint_id=tmp_path)
        loaded = [model.get_parameter(name) for name in names]
        assert_equal(loaded, [larger[name] for name in names])
        assert_forward_is_fresh(model)
        scale(1 / 64, *loaded)


@on_ranks(3, gpus=())
def test_saved_while_training_goes_on(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, optimizer = trained(mesh)
    at_call = snapshot(model, optimizer)
    weights, state = dcs.get_state_dict(model, optimizer)
    group = dist.new_group(backend="gloo")  # of the thread that saves
    saving = dcp.async_save(
        {"model": weights, "optimizer": state}, checkpoint_id=tmp_path, process_group=group
    )
    for number in range(3):
        train(model, optimizer, number)
    saving.result()
    dist.barrier()

    other, their_optimizer = sharded(converted(seed=3), mesh)
    load(other, their_optimizer, str(tmp_path), mesh)
    assert_same_tensors(snapshot(other, their_optimizer), at_call)
    assert not torch.equal(whole(model[2].weight), at_call["2.weight"])


@pytest.mark.parametrize(
    ("names", "assign", "after_forward"),
    [(None, True, True), (None, True, False), (None, False, True), (["2.weight"], True, True)],
)
@on_ranks(3, gpus=())
def test_plain_dtensors_become_weights_that_are_gathered_in_fp8(
    mesh: DeviceMesh, names: list[str] | None, assign: bool, after_forward: bool
) -> None:
    model, _ = trained(mesh)
    target, _ = sharded(converted(seed=4), mesh)
    if after_forward:
        loss_of(target, 0)
    values = model.state_dict()
    state = {name: values[name].clone() for name in names or values}
    assert {type(value._local_tensor) for value in state.values()} == {Tensor}
    target.load_state_dict(state, assign=assign, strict=names is None)
    assert_forward_is_fresh(target)
    for name in state:
        p, q = target.get_parameter(name), model.get_parameter(name)
        assert_equal([p], [q])
        if name.endswith("weight"):
            assert type(p._local_tensor) is FP8Shard
            assert p._local_tensor.recipe == q._local_tensor.recipe
    train(target, Averaged(target.parameters(), lr=1e-2), 9)
    assert_forward_is_fresh(target)


@on_ranks(2, gpus=())
def test_a_rank_may_send_its_rows(mesh: DeviceMesh) -> None:
    """A read: it is no change on that rank, between a forward and its backward or elsewhere."""
    model, _ = trained(mesh)
    loss = loss_of(model, 0)
    rows = model[0].weight.detach().to_local()
    if dist.get_rank() == 1:
        dist.send(rows, 0)
    else:
        dist.recv(torch.empty(rows.shape, dtype=rows.dtype), 1)
    loss.backward()
    assert_forward_is_fresh(model)


CHANGED = r"FP8 weight that FSDP2 gathers was changed or moved on this rank between a forward"


@pytest.mark.parametrize("forwards", [1, 2])
@on_ranks(2, gpus=())
def test_a_change_between_forward_and_backward(mesh: DeviceMesh, forwards: int) -> None:
    """Raises, alike on all ranks, also if a second forward has seen the change."""
    model, optimizer = trained(mesh)
    losses = [loss_of(model, 0)]
    scale(2, model[2].weight)
    if forwards == 2:
        losses.append(loss_of(model, 1))
    with pytest.raises(RuntimeError, match=CHANGED):
        sum(losses).backward()
    optimizer.zero_grad()
    if forwards == 1:
        with pytest.raises(RuntimeError, match=r"call reset_iter_state\(\)"):
            loss_of(model, 0)
    if hasattr(model, "reset_iter_state"):  # torch 2.13
        model.reset_iter_state()
        for part in (*model[::2], model):
            part.reshard()
        assert_forward_is_fresh(model)


@pytest.mark.parametrize("counted", ["parameter", "part", "master"])
@on_ranks(2, gpus=())
def test_writes_that_the_writer_counts(mesh: DeviceMesh, counted: str) -> None:
    """By ``increment_version`` of whichever tensor it has, after a write that PyTorch misses."""
    model, _ = trained(mesh)
    loss = loss_of(model, 0)
    weight = model[2].weight
    part: Any = weight._local_tensor
    part.master.view(-1).data.neg_()  # keeps the amaxes: no block becomes NaN
    of = {"parameter": weight, "part": part, "master": part.master}
    torch.autograd.graph.increment_version(of[counted])
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


@on_ranks(2, gpus=())
def test_rows_in_other_memory(mesh: DeviceMesh) -> None:
    """``.data = ...`` counts nothing, and the amaxes of the new rows may be those of the old."""
    model, _ = trained(mesh)
    loss = loss_of(model, 0)
    master = shard_of(model[2].weight).master
    master.data = -master
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


@pytest.mark.parametrize("where", ["behind the weight", "before its gradient"])
@on_ranks(2, gpus=())
def test_a_gather_after_a_backward_that_raised(mesh: DeviceMesh, where: str) -> None:
    """Has the present values, though FSDP's group is as the backward has left it."""

    def fail(grad: Tensor) -> None:
        raise KeyError("a hook")

    model, _ = trained(mesh)
    failing = model[1 if where == "behind the weight" else 2]
    handle = failing.register_forward_hook(lambda module, args, y: y.register_hook(fail) and None)
    with pytest.raises(KeyError, match="a hook"):
        loss_of(model, 0).backward()
    handle.remove()
    for part in (*model[::2], model):
        part.reshard()
    scale(2, model[2].weight)
    single = converted()
    single.load_state_dict({name: whole(p) for name, p in model.named_parameters()})
    model[2].unshard()
    with torch.no_grad():
        assert torch.equal(loss_of(model, 1), loss_of(single, 1))


@on_ranks(2, gpus=())
def test_an_optimizer_in_backward_after_an_evaluation(mesh: DeviceMesh) -> None:
    """FSDP gathers ahead for backward what no backward uses, and what has stepped already."""
    model, _ = sharded(converted(), mesh)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda p, own=optimizer: step(own))
    for number in range(3):
        with torch.no_grad():
            loss_of(model, number)
        loss_of(model, number).backward()
        assert_forward_is_fresh(model)


class Twice(nn.Module):
    """A linear that runs twice in one forward, which changes its weight in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(192, 192, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        shard = shard_of(self.layer.weight)
        (self.layer.weight if shard is None else shard).master.mul_(64)
        return self.layer(y)


@on_ranks(2, gpus=())
def test_a_change_between_two_uses_in_one_forward(mesh: DeviceMesh) -> None:
    model = Twice().bfloat16()
    convert(model, skip_small=False)
    single = copy.deepcopy(model)
    for part in (model.layer, model):
        fully_shard(part, mesh=mesh)
    x = randn(5, 192)
    with torch.no_grad():
        assert torch.equal(model(x), single(x))


# FSDP pads rows again on some ranks alone, which is no change


def assign_clones(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


PADS_AGAIN: dict[str, Callable[[nn.Module], Any]] = {
    "move": lambda model: model.half().bfloat16(),
    "assign": assign_clones,
}
CHANGES_NO_VALUES: dict[str, Callable[[nn.Module], Any]] = {
    "move to where it is": lambda model: model.bfloat16(),
    "load of nothing": lambda model: model.load_state_dict({}, strict=False),
}


@pytest.mark.parametrize("again", CHANGES_NO_VALUES)
@pytest.mark.parametrize("pads", PADS_AGAIN)
@on_ranks(3, gpus=())
def test_rows_that_were_padded_again(mesh: DeviceMesh, pads: str, again: str) -> None:
    """The table is kept: those ranks must not wait for the others to compare weights."""
    model, optimizer = trained(mesh)
    table = table_of(model, 2)
    PADS_AGAIN[pads](model)
    assert_forward_is_fresh(model)
    CHANGES_NO_VALUES[again](model)
    assert_forward_is_fresh(model)
    train(model, optimizer, 1)
    PADS_AGAIN[pads](model)
    for number in (2, 3):
        CHANGES_NO_VALUES[again](model)
        assert_forward_is_fresh(model)
        train(model, optimizer, number)
    assert_forward_is_fresh(model)
    assert table_of(model, 2) is table


@on_ranks(3, gpus=())
def test_a_part_moves_and_the_root_pads_it_later(mesh: DeviceMesh) -> None:
    """FSDP notices the part, which it does not shard by itself, at the root's next load."""
    model = converted()
    fully_shard(model, mesh=mesh)
    loss_of(model, 0).backward()
    model.reshard()
    model[0].half().bfloat16()
    loss_of(model, 0)
    model.reshard()
    table = table_of(model, 0)
    model.load_state_dict({}, strict=False)
    assert_forward_is_fresh(model)
    model.reshard()
    assert table_of(model, 0) is table_of(model, 4) is table


@on_ranks(3, gpus=())
def test_a_move_between_forward_and_backward(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks raise, those that did not pad again too; a load of nothing is no change.

    An address that comes back does not hide a move: counters begin at 0 again.
    """
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda x: 0)
    for prepare in PADS_AGAIN.values():
        model, optimizer = trained(mesh)
        prepare(model)
        loss = loss_of(model, 0)
        model.load_state_dict({}, strict=False)
        loss.backward()
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        model.bfloat16()
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()
