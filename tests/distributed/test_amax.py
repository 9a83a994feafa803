"""Where the blocks of a part lie in the table, for any matrix, number of ranks and dimension."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktensor.distributed.amax import Part
from blocktensor.ops import reference
from tests.numeric import assert_same


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
    whole = reference.part_amax(x, 0, 0)
    table = torch.zeros_like(whole)
    each = -(-x.shape[dim] // ranks)
    for rank in range(ranks):
        start = min(rank * each, x.shape[dim])
        part = Part(tuple(x.shape), dim, start)
        local = x.narrow(dim, start, min(each, x.shape[dim] - start))
        if local.numel():
            place = part.blocks(table, local)
            place.copy_(torch.maximum(place, reference.part_amax(local, *part.offsets)))
    assert_same(table, whole)
