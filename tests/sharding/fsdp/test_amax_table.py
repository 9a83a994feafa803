"""The table of block amaxes: where blocks lie in it, which weights have a place, what is kept."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from blocktensor import Recipe, convert
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128, ceil_div
from blocktensor.sharding.fsdp import amax_table
from blocktensor.sharding.fsdp.amax_table import ShardSlice
from tests.support.models import POWER_OF_TWO, randn
from tests.support.numeric import assert_same
from tests.support.ranks import on_ranks
from tests.support.sharded import (
    assert_equal,
    scale,
    whole,
)
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


@settings(max_examples=80, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 400), st.integers(1, 300)),
    ranks=st.integers(1, 9),
    dim=st.integers(0, 2),
    stacked=st.booleans(),
)
def test_the_parts_of_all_ranks_make_the_table_of_the_whole(
    shape: tuple[int, int, int], ranks: int, dim: int, stacked: bool
) -> None:
    x = randn(*shape, seed=sum(shape))
    if not stacked:
        x, dim = x[0], max(dim - 1, 0)
    whole = reference.shard_amax(x, BLOCKS_128X128, 0, 0)
    table = torch.zeros_like(whole)
    each = ceil_div(x.shape[dim], ranks)
    for rank in range(ranks):
        start = min(rank * each, x.shape[dim])
        shard = ShardSlice(tuple(x.shape), dim, start, BLOCKS_128X128)
        local = x.narrow(dim, start, min(each, x.shape[dim] - start))
        if local.numel():
            place = shard.blocks(table, local)
            amax = reference.shard_amax(local, BLOCKS_128X128, *shard.offsets)
            place.copy_(torch.maximum(place, amax))
    assert_same(table, whole)


# The place of a weight: kept when a model moves, made anew for another recipe


@on_ranks(2, 3, gpus=())
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


@on_ranks(2, 3, gpus=())
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


@on_ranks(2, 3, gpus=())
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
