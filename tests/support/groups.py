"""What tests of grouped products share: awkward group sizes, stacks, and operands by groups."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_1X128, BlockFormat, Quantized
from tests.support.numeric import FORMATS, operand

GROUPS: dict[str, tuple[int, tuple[int, ...]]] = {
    "ragged": (270, (1, 0, 127, 129, 13)),
    "whole blocks": (384, (128, 0, 256)),
    "rows of no group": (200, (70, 0, 60)),
    "all in one": (150, (0, 150, 0)),
    "one group": (150, (150,)),
    "all empty": (5, (0, 0)),
    "no rows": (0, (0, 0, 0)),
}
"""Rows that there are, and the sizes of the groups."""


def ends(*sizes: int, device: torch.device | str = "cpu") -> Tensor:
    """``offs`` of groups of these sizes."""
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device)


def ranges(offs: Tensor) -> list[slice]:
    """The rows of each group."""
    bounds = [0, *offs.tolist()]
    return [slice(a, b) for a, b in pairwise(bounds)]


def stack(experts: int, n: int, k: int, rng: torch.Generator) -> Quantized:
    """A stack ``[E, N, K]`` in 128x128 blocks, with ordinary data and scales."""
    parts = [operand(n, k, 128, rng) for _ in range(experts)]
    data, scale = (torch.stack([part[i] for part in parts]) for i in (0, 1))
    return Quantized(data, scale, FORMATS[128])


def columnwise(x: Tensor, offs: Tensor, format: BlockFormat = BLOCKS_1X128) -> Quantized:
    """The columnwise cast of ``x[T, K]`` in groups."""
    return reference.quantize_grouped_columnwise(x, offs, format)
