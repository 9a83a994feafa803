"""A weight's place in a table of amaxes: kept when a model moves, made anew for another recipe."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktensor import Recipe
from blocktensor.distributed import precompute_block_amax
from blocktensor.distributed.fsdp import places
from tests.support.ranks import on_ranks
from tests.support.sharded import mesh_of
from tests.support.sharded_checkpoints import (
    assert_forward_is_fresh,
    converted,
    loss_of,
    sharded,
    table_of,
    train,
    trained,
    whole,
)


@on_ranks(3, gpus=())
def test_amaxes_that_were_precomputed_serve_one_forward(world: int, device: str) -> None:
    model, _ = trained(mesh_of(world, device))
    table = table_of(model, 0)
    before = table.reductions
    assert precompute_block_amax(model) == 3
    for forwards in (1, 2, 3):
        loss_of(model, 0).backward()
        assert table.reductions == before + forwards
    precompute_block_amax(model)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert_forward_is_fresh(model)


@on_ranks(2, gpus=())
def test_a_model_that_moves_to_an_address_of_before(world: int, device: str) -> None:
    """Memory that it gave up is given to it again, and counters begin at 0."""
    data_ptr = Tensor.data_ptr

    def address(x: Tensor) -> int:
        of_version = sys._getframe(1).f_globals["__name__"] == places.__name__
        return 0 if of_version else data_ptr(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "data_ptr", address)
        model, _ = trained(mesh_of(world, device), recipe=Recipe(cache_weight="step"))
        for _ in range(2):
            model.half().bfloat16()
            before = table_of(model, 0).reductions
            loss_of(model, 0)
            assert table_of(model, 0).reductions == before + 1


@pytest.mark.parametrize("policy", ["backward", "step"])
@on_ranks(3, gpus=())
def test_a_model_that_moves_keeps_its_table(world: int, device: str, policy: Any) -> None:
    """FSDP pads again on some ranks, which must not wait for the others to compare weights."""
    model, optimizer = trained(mesh_of(world, device), recipe=Recipe(cache_weight=policy))
    table = table_of(model, 2)
    model.half().bfloat16()
    assert_forward_is_fresh(model)
    assert table_of(model, 2) is table
    model.half().bfloat16()
    assert precompute_block_amax(model) == 3
    assert_forward_is_fresh(model)
    for step in (2, 3):
        train(model, optimizer, step)
        assert_forward_is_fresh(model)


@on_ranks(2, gpus=())
def test_shards_of_another_recipe_are_assigned(world: int, device: str) -> None:
    """They are gathered, and their inputs cast, by that recipe."""
    mesh, other = mesh_of(world, device), Recipe(scale="power_of_two")
    model, _ = trained(mesh)
    source, _ = sharded(converted(seed=3, recipe=other), mesh)
    before = table_of(model, 0)
    model.load_state_dict({n: p.detach() for n, p in source.named_parameters()}, assign=True)
    reference = converted(recipe=other)
    for _ in range(2):
        reference.load_state_dict({name: whole(p) for name, p in model.named_parameters()})
        with torch.no_grad():
            assert torch.equal(loss_of(model, 7), loss_of(reference, 7))
        model.half().bfloat16()
    assert table_of(model, 0) is not before


@on_ranks(2, gpus=())
def test_tables_end_with_their_model(world: int, device: str) -> None:
    model, optimizer = trained(mesh_of(world, device))
    table = weakref.ref(table_of(model, 0))
    model.half().bfloat16()
    loss_of(model, 0)
    owners = [o for o, (_, place) in places._PLACES.items() if place[0] is table()]
    assert len(owners) == 3
    del model, optimizer, owners
    gc.collect()
    assert table() is None
