"""Cuts of stacks between ranks that are refused, on meshes of one dimension and two."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from blocktensor.sharding.cuts import check_on_grid
from tests.support.models import complaint

CUTS_BLOCKS = "which cut 128x128 blocks: expected cuts at multiples of 128 (fewer ranks), or"
HALVES = _StridedShard(1, split_factor=2)
CUTS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...], str | None]] = [
    ((5, 130, 70), (4,), (Shard(0),), None),
    ((5, 130, 70), (4,), (Replicate(),), None),
    ((5, 130, 70), (1,), (Shard(1),), None),
    ((2, 512, 70), (4,), (Shard(1),), None),
    ((2, 100, 512), (2,), (Shard(-1),), None),
    ((2, 384, 70), (3,), (Shard(1),), None),
    ((2, 512, 512), (2, 2), (Shard(1), Shard(2)), None),
    ((2, 512, 70), (2, 2), (Shard(1), Shard(1)), None),
    ((2, 512, 70), (2,), (HALVES,), None),
    ((2, 512, 70), (2, 2), (HALVES, Shard(1)), None),  # of a part of gate and a part of up
    ((2, 1, 70), (2,), (Shard(1),), None),  # of one rank, and of none
    ((2, 100, 0), (2,), (Shard(2),), None),
    ((8, 130, 70), (2, 2), (Shard(0), _StridedShard(0, split_factor=2)), None),
    ((2, 512, 70), (8,), (Shard(1),), CUTS_BLOCKS),
    ((2, 384, 70), (2,), (Shard(1),), CUTS_BLOCKS),
    ((2, 100, 384), (2,), (Shard(-1),), CUTS_BLOCKS),
    ((2, 256, 70), (2, 2), (Shard(1), Shard(1)), CUTS_BLOCKS),
    ((2, 256, 70), (2,), (HALVES,), CUTS_BLOCKS),
    ((2, 766, 70), (3, 2), (Shard(1), Shard(1)), CUTS_BLOCKS),  # 256, 256, 254 rows, in halves
    (
        (2, 128, 128),
        (2,),
        (Partial(),),
        "a stack [2, 128, 128] with the placement P(sum): expected Shard(dim) or Replicate(), or",
    ),
]


@pytest.mark.parametrize(("shape", "sizes", "placements", "refused"), CUTS)
def test_cuts_of_a_stack(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: Any, refused: str | None
) -> None:
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    mesh = SimpleNamespace(size=lambda dim: sizes[dim], ndim=len(sizes), mesh=ranks)
    given = (shape, mesh, placements, "a stack", "or this")
    if refused is None:
        return check_on_grid(*given)
    text = complaint(NotImplementedError, lambda: check_on_grid(*given))
    assert refused in " ".join(text.split())
