"""A weight's place in a table of amaxes: kept when a model moves, made anew for another recipe."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from blocktensor import Recipe, convert
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


@on_ranks(3, gpus=())
def test_shards_of_other_recipes_are_assigned_and_those_of_before_again(
    world: int, device: str
) -> None:
    mesh = mesh_of(world, device)
    model, _ = trained(mesh)
    other, _ = trained(mesh, recipe=Recipe(scale="power_of_two"))
    states = [aliases(model), aliases(other)]
    for state in (states[1], states[0], states[1], states[0]):
        model.load_state_dict(state, assign=True)
        loss_of(model, 0)
    assert_forward_is_fresh(model)


def aliases(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("policy", ["backward", "step"])
@on_ranks(2, 3, gpus=())
def test_shards_of_another_model_that_has_run_are_assigned(
    world: int, device: str, policy: Any
) -> None:
    """They come without its table: each model counts its own forwards and changes."""
    mesh = mesh_of(world, device)
    model, _ = trained(mesh, recipe=Recipe(cache_weight=policy))
    source, _ = trained(mesh, recipe=Recipe(cache_weight=policy))
    with torch.no_grad():
        source[2].weight.mul_(4)
    loss_of(source, 0)
    own, theirs = table_of(model, 0), table_of(source, 0)
    model.load_state_dict(aliases(source), assign=True)
    assert_forward_is_fresh(source)  # the rows that FSDP padded were read on some ranks alone
    assert_forward_is_fresh(model)
    assert table_of(model, 0) is own is not theirs
    assert table_of(source, 0) is theirs
    model.half().bfloat16()
    with torch.no_grad():
        model[2].weight.mul_(16)
    assert_forward_is_fresh(model)
    assert_forward_is_fresh(source)
    loss = loss_of(model, 0)
    with torch.no_grad():
        model[2].weight.mul_(4)
    with pytest.raises(RuntimeError, match="was changed or moved on this rank"):
        loss.backward()


@on_ranks(2, gpus=())
def test_two_weights_are_exchanged(world: int, device: str) -> None:
    def squares() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(192, 192, bias=False) for _ in range(2))).bfloat16()
        convert(model, auto_filter_small_kn=False)
        return model

    model, _ = sharded(squares(), mesh_of(world, device))
    loss_of(model, 0).backward()
    with torch.no_grad():
        model[0].weight.mul_(8)
    first, second = aliases(model).values()
    model.load_state_dict({"0.weight": second, "1.weight": first}, assign=True)
    reference = squares()
    reference.load_state_dict({name: whole(p) for name, p in model.named_parameters()})
    for step in (7, 8):
        assert torch.equal(loss_of(model, step), loss_of(reference, step))


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
