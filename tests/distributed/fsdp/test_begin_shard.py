"""How a sharded model comes to be: in which order it is converted, sharded and filled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import distribute_tensor

from blocktensor import Recipe, convert
from blocktensor.distributed import FP8Shard, FrozenShard
from tests.support.models import linear, plain
from tests.support.ranks import on_ranks
from tests.support.sharded import assert_trains_as, build, mesh_of, shard, twins, whole


@on_ranks(2)
def test_converted_after_it_was_sharded(world: int, device: str) -> None:
    model, single = build().to(device), build(Recipe()).to(device)
    shard(model, mesh_of(world, device))
    report = convert(model, auto_filter_small_kn=False)
    assert len(report.converted) == 3
    assert {entry.reason for entry in report.converted} == {"trainable, gathered in FP8"}
    assert_trains_as(single, model, device)


@on_ranks(2)
def test_sharded_on_the_meta_device_and_filled(world: int, device: str) -> None:
    single = build(Recipe()).to(device)
    with torch.device("meta"):
        model = build(Recipe())
    mesh = mesh_of(world, device)
    shard(model, mesh)
    model.to_empty(device=device)
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        with torch.no_grad():
            p.copy_(distribute_tensor(whole(q), mesh))
    assert_trains_as(single, model, device)


@on_ranks(2)
def test_loaded_in_place_between_steps(world: int, device: str) -> None:
    model, single = twins(device)
    mesh = mesh_of(world, device)
    shard(model, mesh)
    assert_trains_as(single, model, device)
    other = build(Recipe()).to(device)
    model.load_state_dict({k: distribute_tensor(v, mesh) for k, v in other.state_dict().items()})
    assert_trains_as(other, model, device)


@on_ranks(2, gpus=())
def test_fsdp1_is_refused_on_every_rank(world: int, device: str) -> None:
    model = build(Recipe())
    with pytest.raises(NotImplementedError, match=r"^FullyShardedDataParallel"):
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))


new_zeros = torch.ops.aten.new_zeros


@pytest.mark.parametrize(
    "zeros",
    [
        lambda w: new_zeros(w, (3, 192), dtype=torch.int64),
        lambda w: new_zeros(w, (3, 192), dtype=torch.float32),
        lambda w: new_zeros(w, (3, 192), device="meta"),
        lambda w: new_zeros(w, (192,)),
        lambda w: new_zeros(w, (1, 3, 192)),
    ],
)
def test_only_zeros_that_a_shard_could_be_made_of_are_shards(zeros: Callable[..., Tensor]) -> None:
    weight, frozen = linear(128, 192).weight, linear(128, 192, frozen=True).weight
    assert type(new_zeros(weight, (3, 192))) is FP8Shard
    assert type(new_zeros(frozen, (3, 192))) is FrozenShard
    wanted, got = zeros(plain(weight)), zeros(weight)
    assert type(got) is Tensor
    assert (got.shape, got.dtype, got.device) == (wanted.shape, wanted.dtype, wanted.device)
    with pytest.raises(NotImplementedError, match="new_zeros"):
        zeros(frozen)
    for w in (weight, frozen):  # called by anyone but FSDP
        made = w.new_zeros(3, 192)
        assert (type(made), made.dtype, made.any().item()) == (Tensor, w.dtype, False)
