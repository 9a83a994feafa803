"""Adapters on a base of frozen FP8 weights under FSDP2, beside one process that has it all."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (
    fully_shard,
)

from blocktensor import (
    Recipe,
    freeze,
    memory_report,
)
from blocktensor.distributed import FrozenShard
from tests.distributed.nets import (
    HIDDEN,
    OUT,
    K,
    batch,
    build,
    loss_of,
    mesh_of,
)
from tests.support.numeric import assert_same


def adapters_on_a_frozen_base(world: int, device: str) -> None:
    model = build(Recipe()).to(device)
    model.requires_grad_(False)
    freeze(model)
    tail = nn.Linear(OUT, OUT, bias=False, device=device, dtype=torch.bfloat16)
    model.down = nn.Sequential(model.down, tail)
    single = copy.deepcopy(model)
    before = {name: single.get_submodule(name).weight.rowwise() for name in ("up", "mid")}
    fully_shard(model.up, mesh=mesh_of(world, device))
    fully_shard(model, mesh=mesh_of(world, device))
    held = [p._local_tensor for p in model.parameters()]
    shards = [x for x in held if isinstance(x, FrozenShard)]
    assert len(shards) == 3
    report = memory_report(model).frozen
    assert report.data == sum(x.numel() for x in shards) <= 150 * (K + 2 * HIDDEN)
    assert report.data + report.scales == report.total <= 1.01 * report.data
    with pytest.raises(NotImplementedError, match=r"gather.* needs the values of a frozen FP8"):
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    with pytest.raises(NotImplementedError, match="checkpoint needs the values of a frozen FP8"):
        shards[0].__get_tensor_shard__(None)
    adapters = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert list(adapters) == ["down.1.weight"]
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
        for got, want in zip(weight.rowwise(), form, strict=True):
            assert_same(got, want)
