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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from blocktensor import Recipe, convert
from blocktensor.distributed import FP8Shard, precompute_block_amax
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128, ceil_div
from blocktensor.sharding.fsdp import amax_table
from blocktensor.sharding.fsdp.amax_table import AmaxTable, ShardSlice
from tests.support import sharded as nets
from tests.support.models import POWER_OF_TWO, randn
from tests.support.numeric import assert_same
from tests.support.ranks import on_ranks
from tests.support.sharded import (
    assert_equal,
    batch,
    build,
    gradients,
    places_of,
    scale,
    shard_of,
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


@on_ranks(3, gpus=())
def test_amaxes_that_were_precomputed_serve_one_forward(mesh: DeviceMesh) -> None:
    model, _ = trained(mesh)
    table = table_of(model, 0)
    before = table.reductions
    assert precompute_block_amax(model) == 3
    for forwards in (1, 2, 3):
        loss_of(model, 0).backward()
        assert table.reductions == before + forwards
    precompute_block_amax(model)
    scale(2, model[0].weight)
    assert_forward_is_fresh(model)


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


@both_policies
@on_ranks(2, 3, gpus=())
def test_shards_of_another_model_are_assigned(mesh: DeviceMesh, policy: Any) -> None:
    """They come without its table: each model counts its own forwards and changes."""
    (model, _), (source, _) = (trained(mesh, Recipe(cache_weight=policy)) for _ in range(2))
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


@both_policies
@on_ranks(2, 3, gpus=())
def test_two_models_share_parameters(mesh: DeviceMesh, policy: Any) -> None:
    """Each has them in a table of its own, though the shards are the same objects.

    Biases are not shared: FSDP gathers old values of what another model pads again.
    """
    (model, _), (source, _) = (trained(mesh, Recipe(cache_weight=policy)) for _ in range(2))
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


# The cast that a rank keeps of its rows: how many are made, what is held, and what they are of


LAYERS = 3


def after_a_step(mesh: DeviceMesh, policy: Any = "step") -> nn.Module:
    """Return a model after its first step, whose layers are gathered one by one."""
    model = build(Recipe(cache_weight=policy)).to(mesh.device_type)
    for layer in (model.up, model.mid, model.down, model):
        fully_shard(layer, mesh=mesh)
    loss_of_net(model, 0).backward()
    model.zero_grad()
    return model


def loss_of_net(model: nn.Module, seed: int) -> Tensor:
    return nets.loss_of(model, batch(seed, next(model.parameters()).device.type))


def casts(run: Callable[[], Any]) -> int:
    made, cast = [], amax_table.quantize_shard
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amax_table, "quantize_shard", lambda *x: (made.append(x), cast(*x))[1])
        run()
    return len(made)


def held(model: nn.Module) -> int:
    return sum(len(table._kept) for table in {place.table for place in places_of(model)})


@pytest.mark.parametrize(
    ("policy", "wanted"), [("backward", [6, 6, 6]), ("step", [3, 0, 0]), (False, [6, 6, 6])]
)
@on_ranks(2)
def test_how_many_casts_the_microbatches_of_a_step_make(
    mesh: DeviceMesh, policy: Any, wanted: list[int]
) -> None:
    model = after_a_step(mesh, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(2):
        optimizer.step()
        made = [casts(lambda seed=seed: loss_of_net(model, seed).backward()) for seed in range(3)]
        assert made == wanted
        assert held(model) == (LAYERS if policy == "step" else 0)


@on_ranks(2)
def test_an_evaluation_makes_the_cast_of_the_step(mesh: DeviceMesh) -> None:
    """A move frees it."""
    model = after_a_step(mesh)
    with torch.no_grad():
        model.mid.weight.mul_(2)
        # of one weight the rows changed, and with it the amaxes of all
        assert casts(lambda: loss_of_net(model, 1)) == LAYERS
    assert casts(lambda: loss_of_net(model, 1).backward()) == 0
    assert held(model) == LAYERS
    model.float()
    assert held(model) == 0


@on_ranks(2)
def test_an_uncounted_write_before_backward_is_not_read(mesh: DeviceMesh) -> None:
    model, other = after_a_step(mesh), after_a_step(mesh)
    losses = loss_of_net(model, 1), loss_of_net(other, 1)
    for p in other.parameters():
        if (local := shard_of(p)) is not None:
            local.master.data.mul_(64)
    for loss in losses:
        loss.backward()
    assert_equal(gradients(model), gradients(other))


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

    def cast() -> Tensor:
        return table.once_a_step(0, lambda: torch.zeros(3))

    first = cast()
    assert cast() is first
    weight.count += 1
    second = cast()
    assert second is not first
    table.reductions += 1
    third = cast()
    assert third is not second
    weight.local = FP8Shard(torch.ones(3, 8), Recipe())  # other rows, and the first are freed
    assert len(table._kept) == 0
    assert cast() is not third
    assert len(table._kept) == 1


@pytest.mark.gpu
def test_another_stream_finds_nothing() -> None:
    table, _ = table_of_one("cuda")
    first = table.once_a_step(0, lambda: torch.zeros(3))
    assert table.once_a_step(0, lambda: torch.zeros(3)) is first
    with torch.cuda.stream(torch.cuda.Stream()):
        assert table.once_a_step(0, lambda: torch.zeros(3)) is not first
