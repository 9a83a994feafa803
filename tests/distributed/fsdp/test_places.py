"""A weight's place in a table of amaxes: kept when a model moves, made anew for another recipe."""

from __future__ import annotations

import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from blocktensor import Recipe, convert
from blocktensor.distributed import precompute_block_amax
from blocktensor.distributed.fsdp import amax_table
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


@pytest.mark.parametrize("policy", ["backward", "step"])
@on_ranks(2, 3, gpus=())
def test_two_models_share_parameters(world: int, device: str, policy: Any) -> None:
    """Each has them in a table of its own, though the shards are the same objects.

    Biases are not shared: FSDP gathers old values of what another model pads again.
    """
    mesh = mesh_of(world, device)
    model, _ = trained(mesh, recipe=Recipe(cache_weight=policy))
    source, _ = trained(mesh, recipe=Recipe(cache_weight=policy))
    state = source.state_dict(keep_vars=True)
    del state["0.bias"]
    model.load_state_dict(state, strict=False, assign=True)
    assert model[0].weight is source[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        for trains in (model, source):
            train(trains, optimizer, step)
            for sharing in (model, source):
                assert_forward_is_fresh(sharing)
        assert precompute_block_amax(source) == 3
        model.load_state_dict({}, strict=False)
        assert_forward_is_fresh(source)


@on_ranks(2, gpus=())
def test_a_shard_of_another_recipe_is_assigned_between_forward_and_backward(
    world: int, device: str
) -> None:
    """A backward that does not read this weight reads the others as its forward did."""
    model, other = converted(), converted(recipe=Recipe(scale="power_of_two"))
    for root in (model, other):  # backward gathers all weights at once
        fully_shard(root, mesh=mesh_of(world, device), reshard_after_forward=True)
    gradients = []
    for assigns in (False, True):
        model.zero_grad()
        loss = loss_of(model, 0)
        if assigns:
            first = {"0.weight": other[0].weight.detach()}
            model.load_state_dict(first, strict=False, assign=True)
        loss.backward()
        found = [p.grad for name, p in model.named_parameters() if name != "0.weight"]
        gradients.append([whole(grad) for grad in found if grad is not None])
        loss_of(model, 0).backward()
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)


@on_ranks(2, gpus=())
def test_parameters_are_pickled_after_a_forward(world: int, device: str) -> None:
    model, _ = trained(mesh_of(world, device))
    file = io.BytesIO()
    torch.save(dict(model.named_parameters()), file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(found[name]), whole(parameter))


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
    owners = [o for o, place in amax_table._PLACES.items() if place.table is table()]
    assert len(owners) == 3
    del model, optimizer, owners
    gc.collect()
    assert table() is None
