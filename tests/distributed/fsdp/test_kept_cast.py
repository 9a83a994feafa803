"""The cast that a rank keeps of its rows: how many are made, what is held, and what they are of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from blocktensor import Recipe
from blocktensor.distributed.fsdp import amax_table
from blocktensor.distributed.fsdp.amax_table import known_place
from blocktensor.distributed.fsdp.fsdp_internals import owner_of
from blocktensor.distributed.fsdp.shards import shard_of
from tests.support.ranks import on_ranks
from tests.support.sharded import batch, build, loss_of, mesh_of, whole

LAYERS = 3


def sharded(world: int, device: str, policy: Any) -> nn.Module:
    """A model after its first step, whose layers are gathered one by one."""
    model = build(Recipe(cache_weight=policy)).to(device)
    for layer in (model.up, model.mid, model.down):
        fully_shard(layer, mesh=mesh_of(world, device))
    fully_shard(model, mesh=mesh_of(world, device))
    loss_of(model, batch(0, device)).backward()
    model.zero_grad()
    return model


class Casts:
    """Counts the casts of shards while it is entered."""

    def __enter__(self) -> Casts:
        self.count, cast = 0, amax_table.quantize_shard

        def counted(*args: Any) -> Tensor:
            self.count += 1
            return cast(*args)

        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(amax_table, "quantize_shard", counted)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def held(model: nn.Module) -> int:
    """How many weights' casts are kept."""
    shards = [shard_of(p) for p in model.parameters()]
    places = [place for s in shards if s is not None and (place := known_place(owner_of(s))) is not None]
    return sum(place.table.slices[place.slot] is not None and len(place.table._kept) for place in places[:1])


def gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for p in model.parameters():
        assert p.grad is not None
        found.append(whole(p.grad))
    return found


@on_ranks(2)
def test_how_many_casts_the_microbatches_of_a_step_make(world: int, device: str) -> None:
    casts: dict[Any, tuple[int, ...]] = {
        "backward": (6, 6, 6),
        "step": (3, 0, 0),
        False: (6, 6, 6),
    }
    for policy, wanted in casts.items():
        model = sharded(world, device, policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for _ in range(2):
            optimizer.step()
            made = []
            for micro in range(3):
                with Casts() as counted:
                    loss_of(model, batch(micro, device)).backward()
                made.append(counted.count)
            assert tuple(made) == wanted, policy
            assert held(model) == (LAYERS if policy == "step" else 0)


@on_ranks(2)
def test_an_evaluation_makes_the_cast_of_the_step(world: int, device: str) -> None:
    model = sharded(world, device, "step")
    with torch.no_grad():
        model.mid.weight.mul_(2)
        with Casts() as counted:
            loss_of(model, batch(1, device))
    # of one weight the rows changed, and with it the amaxes of all
    assert counted.count == LAYERS
    with Casts() as counted:
        loss_of(model, batch(1, device)).backward()
    assert counted.count == 0


@on_ranks(2)
def test_an_uncounted_write_between_forward_and_backward_changes_no_gradient(
    world: int, device: str
) -> None:
    found = []
    for writes in (False, True):
        model = sharded(world, device, "step")
        loss = loss_of(model, batch(1, device))
        if writes:
            for p in model.parameters():
                local = shard_of(p)
                if local is not None:
                    local.master.data.mul_(64)
        loss.backward()
        found.append(gradients(model))
    for got, wanted in zip(*found, strict=True):
        assert torch.equal(got, wanted)


@on_ranks(2)
def test_scales_of_a_later_forward_are_not_used_with_bytes_of_an_earlier_one(
    world: int, device: str
) -> None:
    """An evaluation of other values lies between a forward and its backward."""
    model = sharded(world, device, "step")
    loss = loss_of(model, batch(1, device))
    with torch.no_grad():
        model.mid.weight.mul_(8)
        loss_of(model, batch(2, device))
    with pytest.raises(RuntimeError, match="changed"):
        loss.backward()


@on_ranks(2)
def test_a_model_that_moves_keeps_no_bytes(world: int, device: str) -> None:
    model = sharded(world, device, "step")
    assert held(model) == LAYERS
    model.float()
    assert held(model) == 0


