"""Which cuts of a stack are refused, on meshes of one dimension and two."""

from __future__ import annotations

from typing import Any

import pytest
from expecttest import assert_expected_inline
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from blocktensor.distributed.dtensor import check_cuts
from blocktensor.ops.formats import BLOCKS_128X128
from tests.support.models import complaint


class Mesh:
    """The sizes of a mesh."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def size(self, dim: int) -> int:
        return self.sizes[dim]


def check(shape: tuple[int, ...], sizes: tuple[int, ...], *placements: Any) -> None:
    check_cuts(shape, Mesh(*sizes), placements, BLOCKS_128X128, "a stack")


@pytest.mark.parametrize(
    ("shape", "sizes", "placements"),
    [
        ((5, 130, 70), (4,), (Shard(0),)),
        ((5, 130, 70), (4,), (Replicate(),)),
        ((5, 130, 70), (1,), (Shard(1),)),
        ((2, 512, 70), (4,), (Shard(1),)),
        ((2, 100, 512), (2,), (Shard(-1),)),
        ((2, 384, 70), (3,), (Shard(1),)),
        ((2, 512, 512), (2, 2), (Shard(1), Shard(2))),
        ((2, 512, 70), (2, 2), (Shard(1), Shard(1))),
        ((2, 512, 70), (2,), (_StridedShard(1, split_factor=2),)),
        ((8, 130, 70), (2, 2), (Shard(0), _StridedShard(0, split_factor=2))),
    ],
)
def test_parts_of_whole_blocks(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Any, ...]
) -> None:
    check(shape, sizes, *placements)


@pytest.mark.parametrize(
    ("shape", "sizes", "placements", "part"),
    [
        ((2, 512, 70), (8,), (Shard(1),), 64),
        ((2, 384, 70), (2,), (Shard(1),), 192),
        ((2, 100, 384), (2,), (Shard(-1),), 192),
        ((2, 256, 70), (2, 2), (Shard(1), Shard(1)), 64),
        ((2, 256, 70), (2,), (_StridedShard(1, split_factor=2),), 64),
    ],
)
def test_parts_of_blocks(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Any, ...], part: int
) -> None:
    text = complaint(NotImplementedError, lambda: check(shape, sizes, *placements))
    assert f"into parts of {part}, inside" in " ".join(text.split())


def test_partial_sums() -> None:
    assert_expected_inline(
        complaint(NotImplementedError, lambda: check((2, 128, 128), (2,), Partial())),
        """\
a stack [2, 128, 128] with the placement P(sum): expected Shard(dim) or Replicate(),
or leave the stack unconverted (skip=[...])""",
    )
