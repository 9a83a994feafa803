"""Adapters on a base of frozen FP8 weights, sharded, train as in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from blocktensor import Recipe, freeze, memory_report
from blocktensor.distributed import FrozenShard
from blocktensor.distributed.fsdp.shards import chunks
from tests.support.ranks import on_ranks
from tests.support.sharded import (
    HIDDEN,
    OUT,
    K,
    assert_same_cast,
    batch,
    build,
    loss_of,
    mesh_of,
)


def adapters_on_a_frozen_base(device: str) -> tuple[nn.Module, nn.Module]:
    """Three frozen FP8 linears and one that trains; and a copy."""
    model = build(Recipe()).to(device)
    model.requires_grad_(False)
    freeze(model)
    tail = nn.Linear(OUT, OUT, bias=False, device=device, dtype=torch.bfloat16)
    model.down = nn.Sequential(model.down, tail)
    return model, copy.deepcopy(model)


def shard_base(model: nn.Module, world: int, device: str) -> list[FrozenShard]:
    """Shard the model; what this rank holds of the base."""
    fully_shard(model.up, mesh=mesh_of(world, device))
    fully_shard(model, mesh=mesh_of(world, device))
    held = [p._local_tensor for p in model.parameters()]
    return [x for x in held if isinstance(x, FrozenShard)]


def test_moves_under_inference_mode() -> None:
    weight = adapters_on_a_frozen_base("cpu")[0].up.weight
    rows = chunks(weight, 2)[0]
    with torch.inference_mode():
        moved = rows.to(torch.float16)
    assert type(moved) is FrozenShard
    assert torch.equal(moved.data_rows.float(), rows.data_rows.float())


def test_moves_to_another_dtype() -> None:
    rows = chunks(adapters_on_a_frozen_base("cpu")[0].up.weight, 2)[0]
    assert (rows.dtype, rows.to(torch.float32).dtype) == (torch.bfloat16, torch.float32)
    assert rows.float().new_zeros(2, 3).dtype == torch.float32
    assert torch.equal(rows.float().data_rows.float(), rows.data_rows.float())


@on_ranks(2)
def test_a_sharded_model_changes_its_dtype(world: int, device: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model, single = adapters_on_a_frozen_base(device)
        shard_base(model, world, device)
        model.double().to(dtype), single.to(dtype)
        x = batch(0, device).to(dtype)
        assert torch.equal(model(x), single(x))


@on_ranks(2)
def test_adapters_train_and_the_base_stays(world: int, device: str) -> None:
    model, single = adapters_on_a_frozen_base(device)
    before = {name: single.get_submodule(name).weight.rowwise() for name in ("up", "mid")}
    shard_base(model, world, device)

    optimizers = [torch.optim.SGD(m.down[1].parameters(), lr=0.1) for m in (model, single)]
    for step in range(3):
        losses = [loss_of(m, batch(step, device)) for m in (model, single)]
        assert torch.equal(*[loss.detach() for loss in losses]), step
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    model.unshard()
    model.up.unshard()
    for name, form in before.items():
        weight = model.get_submodule(name).weight
        assert not weight.requires_grad
        assert_same_cast(weight.rowwise(), form)


@on_ranks(2)
def test_a_base_rests_at_a_byte_a_parameter_over_all_ranks(world: int, device: str) -> None:
    model, _ = adapters_on_a_frozen_base(device)
    shards = shard_base(model, world, device)
    assert len(shards) == 3
    report = memory_report(model).frozen
    assert report.data == sum(x.numel() for x in shards) <= 150 * (K + 2 * HIDDEN)
    assert report.data + report.scales == report.total <= 1.01 * report.data


@on_ranks(2)
def test_checkpoints_hold_the_adapters_alone(world: int, device: str) -> None:
    model, single = adapters_on_a_frozen_base(device)
    shards = shard_base(model, world, device)
    with pytest.raises(NotImplementedError, match=r"gather.* needs the values of a frozen FP8"):
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    with pytest.raises(NotImplementedError, match="checkpoint needs the values of a frozen FP8"):
        shards[0].__get_tensor_shard__(None)
    adapters = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert list(adapters) == ["down.1.weight"]
    assert torch.equal(*[loss_of(m, batch(0, device)).detach() for m in (model, single)])
