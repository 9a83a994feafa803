"""Block formats: which elements of a matrix share a scale, and how that scale is rounded.

All other code reads block sizes and rounding from a :class:`BlockFormat`. A new format is one more
call of :func:`register`; the reference ops then run with it, and kernels once they are written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

BLOCK = 128
"""Edge of DeepSeek-V3's blocks, in elements, and the contraction of one promoted product."""

ScaleRounding = Literal["fp32", "power_of_two"]


def ceil_div(a: int, b: int) -> int:
    """Return the number of blocks of ``b`` elements that cover ``a`` elements."""
    return -(-a // b)


def num_blocks(size: int) -> int:
    """Return the number of 128-wide blocks that cover ``size`` elements; a partial block counts."""
    return ceil_div(size, BLOCK)


GROUP_STEP = 256
"""Rows in groups are cast into tensors of whole steps of so many rows, so that few sizes occur."""


def group_rows(rows: int) -> int:
    """Return the rows of the rowwise cast of ``rows`` rows in groups: whole ``GROUP_STEP``."""
    return ceil_div(rows, GROUP_STEP) * GROUP_STEP


def group_blocks(rows: int, groups: int) -> int:
    """Return the most blocks that ``rows`` rows in ``groups`` groups take; none is shared.

    The sizes of groups are numbers on a device: what holds their blocks is sized by this bound,
    which is that of :func:`group_rows`.
    """
    return (group_rows(rows) + (BLOCK - 1) * groups) // BLOCK


def group_columns(rows: int, groups: int) -> int:
    """Return the columns of a columnwise cast by groups: those of :func:`group_blocks`."""
    return group_blocks(rows, groups) * BLOCK


@dataclass(frozen=True, eq=False)
class BlockFormat:
    """One format. There is one object for each name, so that formats compare by identity.

    Attributes:
        name: how ops and messages refer to it.
        block_shape: rows and columns of a block; columns lie along the contraction.
        scale_rounding: ``"fp32"``: scale = amax / max. ``"power_of_two"``: that, rounded up.
        dtype: of the data.
    """

    name: str
    block_shape: tuple[int, int]
    scale_rounding: ScaleRounding = "fp32"
    dtype: torch.dtype = torch.float8_e4m3fn

    def __new__(cls, *args: Any, **kwargs: Any) -> BlockFormat:
        """Return the registered format of these values: Dynamo makes constants of graphs so."""
        made = super().__new__(cls)
        made.__init__(*args, **kwargs)  # type: ignore[misc]
        found = _FORMATS.get(made.name)
        return found if found is not None and vars(found) == vars(made) else made

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.block_shape[0]

    @property
    def cols(self) -> int:
        """Columns of a block."""
        return self.block_shape[1]

    @property
    def power_of_two(self) -> bool:
        """Return whether scales are powers of two."""
        return self.scale_rounding == "power_of_two"

    @property
    def transposes(self) -> bool:
        """Return whether the transpose of a cast is the cast of the transpose, byte for byte."""
        return self.rows == self.cols

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of dimensions that the data may have: blocks of one row are those of a matrix."""
        return (2,) if self.rows == 1 else (2, 3)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return shape of the scales of data of ``shape`` ``[..., R, C]``; partial blocks count."""
        *lead, rows, cols = shape
        return (*lead, ceil_div(rows, self.rows), ceil_div(cols, self.cols))

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return bytes of data of ``shape`` and of its fp32 scales, without padding."""
        return math.prod(shape) * self.dtype.itemsize + 4 * math.prod(self.scale_shape(shape))

    def __reduce__(self) -> tuple[Any, ...]:
        return named, (self.name,)  # a copy is the same object


class Quantized(NamedTuple):
    """A matrix (or stack) cast to a format: value = data * scale.

    Attributes:
        data: ``[..., R, C]`` in ``format.dtype``, contiguous along C, the contraction.
        scale: fp32, a number for each block, laid out by ``ops/scale_layouts.py``.
        format: whose blocks these are.
    """

    data: Tensor
    scale: Tensor
    format: BlockFormat


_FORMATS: dict[str, BlockFormat] = {}


def register(block_format: BlockFormat) -> BlockFormat:
    """Make a format known by its name, which ops are given; returns it.

    Raises:
        ValueError: the name is taken.
    """
    if block_format.name in _FORMATS:
        raise ValueError(f"a format named {block_format.name!r} is registered already")
    _FORMATS[block_format.name] = block_format
    return block_format


def named(name: str) -> BlockFormat:
    """Return the format of this name.

    Raises:
        ValueError: no such format.
    """
    found = _FORMATS.get(name)
    if found is None:
        raise ValueError(f"no format is named {name!r}: expected one of {', '.join(_FORMATS)}")
    return found


BLOCKS_1X128 = register(BlockFormat("1x128", (1, BLOCK)))
"""Activations and gradients."""

BLOCKS_128X128 = register(BlockFormat("128x128", (BLOCK, BLOCK)))
"""Weights."""

BLOCKS_1X128_POW2 = register(BlockFormat("1x128_pow2", (1, BLOCK), "power_of_two"))
BLOCKS_128X128_POW2 = register(BlockFormat("128x128_pow2", (BLOCK, BLOCK), "power_of_two"))

ACTIVATION_FORMATS: dict[ScaleRounding, BlockFormat] = {
    "fp32": BLOCKS_1X128,
    "power_of_two": BLOCKS_1X128_POW2,
}
WEIGHT_FORMATS: dict[ScaleRounding, BlockFormat] = {
    "fp32": BLOCKS_128X128,
    "power_of_two": BLOCKS_128X128_POW2,
}
"""The formats of each scale rounding."""

KERNEL_FORMATS = (BLOCKS_1X128, BLOCKS_128X128, BLOCKS_1X128_POW2, BLOCKS_128X128_POW2)
"""Formats that kernels are written for; others run in the reference."""


def with_block_shape(block_shape: Sequence[int], scale_rounding: ScaleRounding) -> BlockFormat:
    """Return the registered e4m3 format with these blocks and this rounding of scales.

    Raises:
        ValueError: there is none.
    """
    wanted = tuple(block_shape), scale_rounding, torch.float8_e4m3fn
    for found in _FORMATS.values():
        if (found.block_shape, found.scale_rounding, found.dtype) == wanted:
            return found
    raise ValueError(
        f"block_shape {tuple(block_shape)}: expected {BLOCKS_1X128.block_shape} (activations, "
        f"gradients) or {BLOCKS_128X128.block_shape} (weights)"
    )
