"""The table of block amaxes: where the blocks of a part lie in it, and when it is filled."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktensor.distributed import precompute_block_amax
from blocktensor.distributed.fsdp.amax_table import ShardSlice
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128, ceil_div
from tests.support.numeric import assert_same
from tests.support.ranks import on_ranks
from tests.support.sharded import (
    assert_trains_as,
    batch,
    loss_of,
    mesh_of,
    reductions,
    shard,
    twins,
)


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


@on_ranks(2)
def test_amaxes_reduced_before_the_forward_are_not_reduced_again(world: int, device: str) -> None:
    model, single = twins(device)
    shard(model, mesh_of(world, device))
    assert precompute_block_amax(model) == 0
    assert_trains_as(single, model, device)
    assert precompute_block_amax(model) == 3  # weights, after the last optimizer step
    before = reductions(model)
    assert torch.equal(*[loss_of(m, batch(9, device)).detach() for m in (model, single)])
    assert reductions(model) == before == 4
