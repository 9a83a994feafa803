"""The table of block amaxes: where blocks lie in it, which weights have a place, what is kept."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from blocktensor import Recipe, convert
from blocktensor.distributed import FP8Shard, precompute_block_amax
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128, ceil_div
from blocktensor.sharding.fsdp import amax_table
from blocktensor.sharding.fsdp.amax_table import AmaxTable, ShardSlice
from blocktensor.sharding.fsdp.shards import shard_of
from tests.support.numeric import assert_same
from tests.support.ranks import on_ranks
from tests.support.sharded import batch, build, mesh_of, places_of
from tests.support.sharded import loss_of as loss_of_net
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

POW2 = Recipe(scale="power_of_two")
both_policies = pytest.mark.parametrize("policy", ["backward", "step"])


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
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()
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


@both_policies
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
    for step in (2, 3):
        assert_forward_is_fresh(model)
        train(model, optimizer, step)
    assert_forward_is_fresh(model)


@on_ranks(2, 3, gpus=())
def test_shards_of_another_recipe_are_assigned_and_back(world: int, device: str) -> None:
    """They are gathered, and their inputs cast, by that recipe, whether that model has run."""
    mesh = mesh_of(world, device)
    model, _ = trained(mesh)
    source, _ = sharded(converted(seed=3, recipe=POW2), mesh)
    states = {POW2: aliases(source), Recipe(): aliases(model)}
    for recipe in (POW2, Recipe(), POW2, Recipe()):
        before = table_of(model, 0)
        model.load_state_dict(states[recipe], assign=True)
        reference = converted(recipe=recipe)
        for _ in range(2):
            reference.load_state_dict({name: whole(p) for name, p in model.named_parameters()})
            with torch.no_grad():
                assert torch.equal(loss_of(model, 7), loss_of(reference, 7))
            model.half().bfloat16()
        assert table_of(model, 0) is not before
        loss_of(source, 0)


@both_policies
@on_ranks(2, 3, gpus=())
def test_shards_of_another_model_are_assigned(world: int, device: str, policy: Any) -> None:
    """They come without its table: each model counts its own forwards and changes."""
    mesh, recipe = mesh_of(world, device), Recipe(cache_weight=policy)
    (model, _), (source, _) = trained(mesh, recipe=recipe), trained(mesh, recipe=recipe)
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


@both_policies
@on_ranks(2, 3, gpus=())
def test_two_models_share_parameters(world: int, device: str, policy: Any) -> None:
    """Each has them in a table of its own, though the shards are the same objects.

    Biases are not shared: FSDP gathers old values of what another model pads again.
    """
    mesh, recipe = mesh_of(world, device), Recipe(cache_weight=policy)
    (model, _), (source, _) = trained(mesh, recipe=recipe), trained(mesh, recipe=recipe)
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
def test_another_recipe_is_assigned_before_backward(world: int, device: str) -> None:
    """A backward that does not read this weight reads the others as its forward did."""
    model, other = converted(), converted(recipe=POW2)
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
        convert(model, skip_small=False)
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


# The cast that a rank keeps of its rows: how many are made, what is held, and what they are of


LAYERS = 3


def after_a_step(world: int, device: str, policy: Any) -> nn.Module:
    """Return a model after its first step, whose layers are gathered one by one."""
    model = build(Recipe(cache_weight=policy)).to(device)
    for layer in (model.up, model.mid, model.down, model):
        fully_shard(layer, mesh=mesh_of(world, device))
    loss_of_net(model, batch(0, device)).backward()
    model.zero_grad()
    return model


def casts(run: Callable[[], Any]) -> int:
    """Run, and return how many shards were cast."""
    made, cast = [], amax_table.quantize_shard
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amax_table, "quantize_shard", lambda *x: (made.append(x), cast(*x))[1])
        run()
    return len(made)


def held(model: nn.Module) -> int:
    """Return how many weights' casts are kept."""
    return sum(len(table._kept) for table in {place.table for place in places_of(model)})


@pytest.mark.parametrize(
    ("policy", "wanted"), [("backward", (6, 6, 6)), ("step", (3, 0, 0)), (False, (6, 6, 6))]
)
@on_ranks(2)
def test_how_many_casts_the_microbatches_of_a_step_make(
    world: int, device: str, policy: Any, wanted: tuple[int, ...]
) -> None:
    model = after_a_step(world, device, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(2):
        optimizer.step()
        inputs = [batch(micro, device) for micro in range(3)]
        made = [casts(lambda x=x: loss_of_net(model, x).backward()) for x in inputs]
        assert tuple(made) == wanted
        assert held(model) == (LAYERS if policy == "step" else 0)


@on_ranks(2)
def test_an_evaluation_makes_the_cast_of_the_step(world: int, device: str) -> None:
    """A move frees it."""
    model, x = after_a_step(world, device, "step"), batch(1, device)
    with torch.no_grad():
        model.mid.weight.mul_(2)
        # of one weight the rows changed, and with it the amaxes of all
        assert casts(lambda: loss_of_net(model, x)) == LAYERS
    assert casts(lambda: loss_of_net(model, x).backward()) == 0
    assert held(model) == LAYERS
    model.float()
    assert held(model) == 0


@on_ranks(2)
def test_an_uncounted_write_before_backward_is_not_read(world: int, device: str) -> None:
    found: list[list[Tensor]] = []
    for writes in (False, True):
        model = after_a_step(world, device, "step")
        loss = loss_of_net(model, batch(1, device))
        for p in model.parameters() if writes else []:
            local = shard_of(p)
            if local is not None:
                local.master.data.mul_(64)
        loss.backward()
        found.append([whole(p.grad) for p in model.parameters()])
    assert all(map(torch.equal, *found))


@on_ranks(2)
def test_scales_of_a_later_forward_are_not_used(world: int, device: str) -> None:
    """An evaluation of other values lies between a forward and its backward."""
    model = after_a_step(world, device, "step")
    loss = loss_of_net(model, batch(1, device))
    with torch.no_grad():
        model.mid.weight.mul_(8)
        loss_of_net(model, batch(2, device))
    with pytest.raises(RuntimeError, match="changed"):
        loss.backward()


def table_of_one(device: str = "cpu") -> tuple[AmaxTable, Any]:
    """Return a table of one weight, which nobody shards, and that weight."""
    shard = FP8Shard(torch.ones(3, 8, device=device), Recipe())
    weight: Any = SimpleNamespace(
        shape=(3, 8), dim=0, start=0, device=torch.device(device), tensor=None, local=shard
    )
    weight.count, weight.changes = 0, lambda: weight.count
    return AmaxTable([weight], reuses=True, alone=False), weight


def test_bytes_of_other_values_or_rows_are_not_found() -> None:
    table, weight = table_of_one()
    first = table.once_a_step(0, lambda: torch.zeros(3))
    assert table.once_a_step(0, lambda: torch.zeros(3)) is first
    weight.count += 1
    second = table.once_a_step(0, lambda: torch.zeros(3))
    assert second is not first
    table.reductions += 1
    third = table.once_a_step(0, lambda: torch.zeros(3))
    assert third is not second
    weight.local = FP8Shard(torch.ones(3, 8), Recipe())  # other rows, and the first are freed
    assert len(table._kept) == 0
    assert table.once_a_step(0, lambda: torch.zeros(3)) is not third
    assert len(table._kept) == 1


@pytest.mark.gpu
def test_another_stream_finds_nothing() -> None:
    table, _ = table_of_one("cuda")
    first = table.once_a_step(0, lambda: torch.zeros(3))
    assert table.once_a_step(0, lambda: torch.zeros(3)) is first
    with torch.cuda.stream(torch.cuda.Stream()):
        assert table.once_a_step(0, lambda: torch.zeros(3)) is not first
