"""The table of block amaxes: which weights have a place in it, what is kept."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from blocktensor import Recipe, convert
from blocktensor.sharding.fsdp import amax_table
from tests.support.models import POWER_OF_TWO
from tests.support.ranks import on_ranks
from tests.support.sharded import assert_equal, scale, whole
from tests.support.sharded_checkpoints import (
    assert_forward_is_fresh,
    converted,
    loss_of,
    sharded,
    table_of,
    train,
    trained,
)


def aliases(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@on_ranks(3, gpus=())
def test_shards_of_another_recipe_are_assigned_and_back(mesh: DeviceMesh) -> None:
    """They are gathered, and their inputs cast, by that recipe, whether that model has run."""
    model, _ = trained(mesh)
    source, _ = sharded(converted(seed=3, recipe=POWER_OF_TWO), mesh)
    states = {POWER_OF_TWO: aliases(source), Recipe(): aliases(model)}
    for recipe in (POWER_OF_TWO, Recipe(), POWER_OF_TWO, Recipe()):
        before = table_of(model, 0)
        model.load_state_dict(states[recipe], assign=True)
        for _ in range(2):
            assert_forward_is_fresh(model, converted(recipe=recipe))
            model.half().bfloat16()
        assert table_of(model, 0) is not before
        loss_of(source, 0)


@on_ranks(3, gpus=())
def test_shards_of_another_model_are_assigned(mesh: DeviceMesh) -> None:
    """They come without its table: each model counts its own forwards and changes."""
    (model, _), (source, _) = (trained(mesh) for _ in range(2))
    scale(4, source[2].weight)
    loss_of(source, 0)
    own, theirs = table_of(model, 0), table_of(source, 0)
    model.load_state_dict(aliases(source), assign=True)
    assert_forward_is_fresh(source)  # the rows that FSDP padded were read on some ranks alone
    assert_forward_is_fresh(model)
    assert table_of(model, 0) is own is not theirs
    assert table_of(source, 0) is theirs
    model.half().bfloat16()
    scale(16, model[2].weight)
    assert_forward_is_fresh(model)
    assert_forward_is_fresh(source)
    loss = loss_of(model, 0)
    scale(4, model[2].weight)
    with pytest.raises(RuntimeError, match="was changed or moved on this rank"):
        loss.backward()


@on_ranks(3, gpus=())
def test_two_models_share_parameters(mesh: DeviceMesh) -> None:
    """Each has them in a table of its own, though the shards are the same objects.

    Biases are not shared: FSDP gathers old values of what another model pads again.
    """
    (model, _), (source, _) = (trained(mesh) for _ in range(2))
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
        model.load_state_dict({}, strict=False)
        assert_forward_is_fresh(source)


@on_ranks(2, gpus=())
def test_another_recipe_is_assigned_before_backward(mesh: DeviceMesh) -> None:
    """A backward that does not read this weight reads the others as its forward did."""
    model, other = converted(), converted(recipe=POWER_OF_TWO)
    for root in (model, other):  # backward gathers all weights at once
        fully_shard(root, mesh=mesh, reshard_after_forward=True)
    found = []
    for assigns in (False, True):
        model.zero_grad()
        loss = loss_of(model, 0)
        if assigns:
            first = {"0.weight": other[0].weight.detach()}
            model.load_state_dict(first, strict=False, assign=True)
        loss.backward()
        found.append([whole(p.grad) for name, p in model.named_parameters() if name != "0.weight"])
        loss_of(model, 0).backward()
    assert_equal(*found)


@on_ranks(2, gpus=())
def test_parameters_are_pickled_after_a_forward(mesh: DeviceMesh) -> None:
    model, _ = trained(mesh)
    file = io.BytesIO()
    torch.save(dict(model.named_parameters()), file)
    file.seek(0)
    assert_equal(torch.load(file, weights_only=False).values(), model.parameters())


@on_ranks(2, gpus=())
def test_two_weights_are_exchanged(mesh: DeviceMesh) -> None:
    def squares() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(192, 192, bias=False) for _ in range(2))).bfloat16()
        convert(model, skip_small=False)
        return model

    model, _ = sharded(squares(), mesh)
    loss_of(model, 0).backward()
    scale(8, model[0].weight)
    first, second = aliases(model).values()
    model.load_state_dict({"0.weight": second, "1.weight": first}, assign=True)
    assert_forward_is_fresh(model, squares())


@on_ranks(2, gpus=())
def test_tables_end_with_their_model(mesh: DeviceMesh) -> None:
    model, optimizer = trained(mesh)
    table = weakref.ref(table_of(model, 0))
    model.half().bfloat16()
    loss_of(model, 0)
    owners = [o for o, place in amax_table._PLACES.items() if place.table is table()]
    assert len(owners) == 3
    del model, optimizer, owners
    gc.collect()
    assert table() is None
