"""A frozen base under adapters, of which each rank holds e4m3 rows and all scales."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from blocktensor import BlockwiseFP8Tensor, Recipe, freeze, unfreeze
from blocktensor.sharding.fsdp.shards import FrozenShard, chunks
from tests.support.models import randn
from tests.support.ranks import on_ranks
from tests.support.sharded import (
    HIDDEN,
    OUT,
    RECIPES,
    K,
    assert_same_cast,
    assert_trains_as,
    batch,
    build,
)


def adapters_on_a_frozen_base(device: str = "cpu") -> tuple[nn.Module, nn.Module]:
    model = build(Recipe()).to(device)
    model.requires_grad_(False)
    freeze(model)
    tail = nn.Linear(OUT, OUT, bias=False, device=device, dtype=torch.bfloat16)
    model.down = nn.Sequential(model.down, tail)
    return model, copy.deepcopy(model)


def another_frozen_base(
    model: nn.Module, recipe: Recipe | None = None, device: str = "cpu"
) -> tuple[nn.Module, nn.Module]:
    """Return a base of other values, under the adapter of ``model``, and a copy of it."""
    other = build(recipe or Recipe()).to(device)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3)
    other.requires_grad_(False)
    freeze(other)
    other.down = nn.Sequential(other.down, copy.deepcopy(model.down[1]))
    return other, copy.deepcopy(other)


def shard_base(model: nn.Module, mesh: DeviceMesh) -> list[FrozenShard]:
    for part in (model.up, model):
        fully_shard(part, mesh=mesh)
    held = [p._local_tensor for p in model.parameters()]
    return [x for x in held if isinstance(x, FrozenShard)]


def test_frozen_rows_move() -> None:
    rows = chunks(adapters_on_a_frozen_base()[0].up.weight, 2)[0]
    assert (rows.dtype, rows.to(torch.float32).dtype) == (torch.bfloat16, torch.float32)
    assert rows.float().new_zeros(2, 3).dtype == torch.float32
    with torch.inference_mode():
        inferred = rows.to(torch.float16)
    for moved in (rows.float(), inferred):
        assert type(moved) is FrozenShard
        assert torch.equal(moved.data_rows.float(), rows.data_rows.float())
    assert rows.is_pinned() is False
    with pytest.raises(NotImplementedError, match=r"copy_.* needs the values of a frozen FP8"):
        rows.copy_(torch.ones(rows.shape))
    with pytest.raises(NotImplementedError, match=r"in 128x128 blocks, got blocks of \(1, 128\)"):
        chunks(BlockwiseFP8Tensor.from_values(randn(256, 256), (1, 128)), 2)


@on_ranks(2, gpus=())
def test_a_sharded_frozen_base_on_meta_gets_memory_for_rows_and_scales(
    mesh: DeviceMesh, device: str
) -> None:
    filled, single = adapters_on_a_frozen_base()
    empty = copy.deepcopy(filled).to("meta")
    rows = shard_base(empty, mesh)
    assert all(x.data_rows.is_meta and x.scale.is_meta for x in rows)
    shard_base(filled, mesh)
    empty.to_empty(device=device)
    with torch.no_grad():
        for p, q in zip(empty.parameters(), filled.parameters(), strict=True):
            p.copy_(q)
    x = batch(0, device)
    assert torch.equal(empty(x), single(x))


@on_ranks(1, 2, gpus=())
def test_frozen_rows_that_are_copied_bring_their_scales(mesh: DeviceMesh, device: str) -> None:
    model, _ = adapters_on_a_frozen_base()
    other, single = another_frozen_base(model)
    for each in (model, other):
        shard_base(each, mesh)
    with torch.no_grad():
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.copy_(q)
    x = batch(0, device)
    assert torch.equal(model(x), single(x))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.scale)
@pytest.mark.parametrize("has_run", [False, True])
@on_ranks(1, 2, gpus=())
def test_frozen_shards_that_are_assigned_bring_their_scales(
    mesh: DeviceMesh, device: str, has_run: bool, recipe: Recipe
) -> None:
    """And their recipe; also to weights that FSDP has gathered before, in memory used again."""
    model, _ = adapters_on_a_frozen_base(device)
    other, single = another_frozen_base(model, recipe, device)
    for each in (model, other):
        shard_base(each, mesh)
    x = batch(0, device)
    if has_run:
        model(x).sum().backward()
    model.load_state_dict(dict(other.state_dict()), assign=True)
    assert torch.equal(model(x), single(x))


@pytest.mark.parametrize("what", ["values", "recipe"])
@on_ranks(2, gpus=())
def test_ranks_that_hold_other_frozen_weights_are_told(mesh: DeviceMesh, what: str) -> None:
    """Each would multiply the bytes of all ranks by its own scales."""
    model, _ = adapters_on_a_frozen_base()
    other, _ = another_frozen_base(model, RECIPES[1] if what == "recipe" else None)
    rank, x = mesh.get_local_rank(), batch(0, "cpu")
    model = other if rank else model
    shard_base(model, mesh)
    with pytest.raises(RuntimeError, match=r"^ranks disagree on frozen sharded FP8 weights: ra"):
        model(x)


@on_ranks(2, gpus=())
def test_ranks_that_load_other_frozen_weights_in_place_are_told(mesh: DeviceMesh) -> None:
    model, _ = adapters_on_a_frozen_base()
    other, _ = another_frozen_base(model)
    for each in (model, other):
        shard_base(each, mesh)
    x = batch(0, "cpu")
    model(x)
    loaded = other if mesh.get_local_rank() else model
    model.load_state_dict({name: p.clone() for name, p in loaded.state_dict().items()})
    with pytest.raises(RuntimeError, match=r"^ranks disagree on frozen sharded FP8 weights: ra"):
        model(x)


@pytest.mark.parametrize("change", [freeze, unfreeze])
@on_ranks(2, gpus=())
def test_gathered_weights_are_sharded_weights(mesh: DeviceMesh, change: Callable[..., Any]) -> None:
    model, single = adapters_on_a_frozen_base()
    shard_base(model, mesh)
    x = batch(0, "cpu")
    with torch.no_grad():
        model(x)
    assert isinstance(model.mid.weight, BlockwiseFP8Tensor)  # the root stays gathered
    with pytest.raises(NotImplementedError, match=r"'.*' is sharded by FSDP2, and stays"):
        change(model)
    assert torch.equal(model(x), single(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@on_ranks(2)
def test_a_sharded_model_changes_its_dtype(
    mesh: DeviceMesh, device: str, dtype: torch.dtype
) -> None:
    model, single = adapters_on_a_frozen_base(device)
    shard_base(model, mesh)
    model.double().to(dtype), single.to(dtype)
    x = batch(0, device).to(dtype)
    assert torch.equal(model(x), single(x))


@on_ranks(2)
def test_adapters_train_and_the_base_stays(mesh: DeviceMesh, device: str) -> None:
    """It rests at a byte a parameter over all ranks; checkpoints hold the adapters alone."""
    model, single = adapters_on_a_frozen_base(device)
    before = {name: single.get_submodule(name).weight.rowwise() for name in ("up", "mid")}
    shards = shard_base(model, mesh)
    assert len(shards) == 3
    data = sum(shard.data_rows.nbytes for shard in shards)
    assert data == sum(x.numel() for x in shards) <= 150 * (K + 2 * HIDDEN)
    assert sum(shard.scale.nbytes for shard in shards) <= 0.01 * data

    with pytest.raises(NotImplementedError, match=r"gather.* needs the values of a frozen FP8"):
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    with pytest.raises(NotImplementedError, match="cannot save or load a frozen FP8 weight as one"):
        shards[0].__create_chunk_list__()
    adapters = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert list(adapters) == ["down.1.weight"]

    assert_trains_as(single, model, device)
    model.unshard()
    model.up.unshard()
    for name, form in before.items():
        weight = model.get_submodule(name).weight
        assert not weight.requires_grad
        assert_same_cast(weight.rowwise(), form)


@on_ranks(2)
def test_a_whole_state_of_a_frozen_base(mesh: DeviceMesh, device: str) -> None:
    model, single = adapters_on_a_frozen_base(device)
    state, options = single.state_dict(), StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, dict(state), options=options)
    shard_base(model, mesh)
    with pytest.raises(NotImplementedError, match=r"^set_model_state_dict cannot send parts of"):
        set_model_state_dict(model, state, options=options)


@pytest.mark.usefixtures("group")
def test_a_frozen_base_is_not_sent_to_ranks_that_expect_plain_tensors() -> None:
    model, single = adapters_on_a_frozen_base("cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(NotImplementedError, match=r"^set_model_state_dict cannot send parts of"):
        set_model_state_dict(model, single.state_dict(), options=options)
