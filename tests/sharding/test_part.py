"""Parts of a weight, cast with the scales of the whole: its bytes, whatever the cuts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128, BLOCKS_128X128_POW2, BlockFormat
from blocktensor.sharding.part import Part, Piece, Region, max_over_ranks
from tests.support.models import randn
from tests.support.numeric import assert_same
from tests.support.ranks import on_ranks


def regions(bounds: list[list[int]]) -> list[Region]:
    """The regions between the bounds along each dimension, each held by a rank of its own."""
    runs = ([Piece(a, 0, b - a) for a, b in itertools.pairwise(along)] for along in bounds)
    return [Region(pieces) for pieces in itertools.product(*runs)]


@st.composite
def cuts(draw: st.DrawFn) -> list[list[int]]:
    """Bounds along two or three dimensions of a weight; parts may be empty."""
    sizes = [draw(st.integers(1, 3))] * draw(st.booleans()) + [
        draw(st.sampled_from((1, 127, 128, 200, 300))) for _ in range(2)
    ]
    return [[0, *sorted(draw(st.lists(st.integers(0, size), max_size=3))), size] for size in sizes]


@settings(max_examples=40, deadline=None)
@given(cuts(), st.sampled_from((BLOCKS_128X128, BLOCKS_128X128_POW2)))
def test_parts_have_the_bytes_of_the_whole(bounds: list[list[int]], format: BlockFormat) -> None:
    shape = tuple(along[-1] for along in bounds)
    values = randn(*shape, dtype=torch.float32) * 10 ** randn(*shape, seed=1, dtype=torch.float32)
    held = [(Part(shape, region, format), values[region.slices]) for region in regions(bounds)]
    held = [(part, mine) for part, mine in held if mine.numel()]
    amax = torch.zeros(format.scale_shape(shape))
    for part, mine in held:
        blocks = amax[part.blocks]
        torch.maximum(blocks, part.amax(mine), out=blocks)
    data = torch.empty(shape, dtype=format.dtype)
    for part, mine in held:
        data[part.region.slices] = part.cast(mine, amax[part.blocks])
    wanted = reference.quantize_rowwise(values, format)
    assert_same(reference.scale_from_amax(amax, format), wanted.scale)
    assert_same(data, wanted.data)


def test_a_region_along_one_dimension_takes_all_of_the_others() -> None:
    region = Region.along(1, 100, 60, (3, 200, 130))
    whole = randn(3, 200, 130)
    assert torch.equal(region.of(whole[:, 100:160]), whole[region.slices])
    part = Part((3, 200, 130), region, BLOCKS_128X128)
    assert part.scale_shape == (3, 2, 2)
    assert part.blocks == (slice(0, 3), slice(0, 2), slice(0, 2)) and part.offsets == (100, 0)


def test_blocks_whose_own_amax_has_changed_become_nan() -> None:
    values = randn(200, 130, dtype=torch.float32)
    part = Part((200, 130), Region.along(0, 0, 200, (200, 130)), BLOCKS_128X128)
    own = part.amax(values)
    values[150, 3] = 100
    cast = part.cast(values, own, own).float()
    assert cast[128:, :128].isnan().all() and cast[128:, 128:].isfinite().all()
    assert cast[:128].isfinite().all()
    assert part.cast(values, own).float().isfinite().all()  # saturated


@pytest.mark.parametrize("functional", [False, True])
@on_ranks(2, gpus=())
def test_maxima_keep_nan_and_infinity(mesh: DeviceMesh, functional: bool) -> None:
    """A maximum of floats would lose NaN."""
    nan, inf = math.nan, math.inf
    amax: Tensor = torch.tensor(
        ([nan, 1.0, inf, 0.0, 3.0], [inf, inf, nan, 0.0, 2.0])[dist.get_rank()]
    )
    before = amax.clone()
    found = max_over_ranks(amax, mesh.get_group(), functional=functional)
    assert_same(found, torch.tensor([nan, inf, nan, 0.0, 3.0]))
    assert_same(amax, before if functional else found)
