"""Define block formats: which elements of a matrix share a scale, and how scales are rounded.

All other code reads block sizes and rounding from a :class:`BlockFormat`. To add a format, call
:func:`register`: the reference ops then run with it. Kernels must be written for it. To add a
rounding of scales, add an entry to ``ROUNDINGS``: CONTRIBUTING.md has the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

BLOCK = 128
"""Edge of DeepSeek-V3's blocks, and the size along K of one promoted product, in elements."""

ScaleRounding = Literal["fp32", "power_of_two"]
"""The names in ``ROUNDINGS``, which ``Recipe(scale=...)`` takes."""

WeightGrid = Literal["mxfp4", "mxfp4_kn"]
"""The names in ``GRID_FORMATS``, which ``Recipe(weight_grid=...)`` takes."""

MXFP4_GROUP = 32
"""Numbers along the contraction that share a scale in MXFP4 (OCP Microscaling Formats 1.0)."""


class Rounding(NamedTuple):
    """A rounding of scales.

    Attributes:
        suffix: the end of the names of its formats.
        noun: a rounded scale, in messages.
        round: rounds finite fp32 scales above 0, and changes no rounded one; None to change none.
            If a normal scale is rounded, its products with powers of two are.
        in_kernels: True if cast kernels round so; otherwise the reference casts on a GPU too.
            Matmuls run in kernels with any scales.
    """

    suffix: str
    noun: str
    round: Callable[[Tensor], Tensor] | None = None
    in_kernels: bool = False


def _up_to_power_of_two(scale: Tensor) -> Tensor:
    return ((scale.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)


ROUNDINGS: dict[ScaleRounding, Rounding] = {
    "fp32": Rounding("", "a finite number above 0", in_kernels=True),
    "power_of_two": Rounding("_pow2", "a power of two", _up_to_power_of_two, in_kernels=True),
}
"""All roundings of scales."""


def ceil_div(a: int, b: int) -> int:
    """Return the number of blocks of ``b`` elements that cover ``a`` elements."""
    return -(-a // b)


def num_blocks(size: int) -> int:
    """Return the number of 128-wide blocks that cover ``size`` elements; a partial block counts."""
    return ceil_div(size, BLOCK)


ROW_STEP = 64
"""Layouts of casts are the same for all numbers of rows that round up to a multiple of this number.

A recorded call then serves all of them (``ops/runtime/record.py``). The heights of tiles are
multiples of it.
"""


def padded_rows(rows: int) -> int:
    """Return ``rows`` rounded up to ``ROW_STEP``."""
    return ceil_div(rows, ROW_STEP) * ROW_STEP


GROUP_STEP = 1024
"""Casts of rows in groups have a multiple of this number of rows, so that few sizes occur.

The ranks of expert parallelism get other numbers of rows at every step. With steps of 256, a rank
with 65,536 rows recorded 15 calls a step, 2 ms each, in its first hundred steps.
"""


def group_rows(rows: int) -> int:
    """Return ``rows`` rounded up to ``GROUP_STEP``: the rows of a rowwise cast in groups."""
    return ceil_div(rows, GROUP_STEP) * GROUP_STEP


def group_blocks(rows: int, groups: int) -> int:
    """Return the most blocks that ``rows`` rows in ``groups`` groups take; groups share none.

    The sizes of groups are known only on the device, so tensors of their blocks have this size. It
    is the same for all ``rows`` with equal :func:`group_rows`.
    """
    return (group_rows(rows) + (BLOCK - 1) * groups) // BLOCK


def group_columns(rows: int, groups: int) -> int:
    """Return the columns of a columnwise cast by groups: 128 for each of :func:`group_blocks`."""
    return group_blocks(rows, groups) * BLOCK


@dataclass(frozen=True, eq=False)
class BlockFormat:
    """A block format. There is one object for each name, so that formats compare by identity.

    Attributes:
        name: its name in ops and messages.
        block_shape: rows and columns of a block; columns lie along the contraction.
        scale_rounding: a name in ``ROUNDINGS``: how the scale amax / max is rounded.
        dtype: the dtype of the data.
        mxfp4_group: if not None, casts first round values to the grid of MXFP4: to numbers of e2m1
            times a power of two for each group of this many rows and columns. The result of such a
            cast is in the format :attr:`stored`.
    """

    name: str
    block_shape: tuple[int, int]
    scale_rounding: ScaleRounding = "fp32"
    dtype: torch.dtype = torch.float8_e4m3fn
    mxfp4_group: tuple[int, int] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> BlockFormat:
        """Return the registered format with these values: Dynamo creates constants this way."""
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
        """Return True if a cast can be transposed exactly: its blocks are squares."""
        return self.rows == self.cols

    @property
    def stored(self) -> BlockFormat:
        """The format of a cast's result: this one, unless casts round to a grid first."""
        if self.mxfp4_group is None:
            return self
        return with_block_shape(self.block_shape, self.scale_rounding)

    @property
    def of_transpose(self) -> BlockFormat:
        """The format that casts the transpose to the transposed bytes of this format's cast.

        Blocks are squares.
        """
        if self.mxfp4_group is None:
            return self
        turned = self.mxfp4_group[::-1]
        return next(x for x in GRID_FORMATS.values() if x.mxfp4_group == turned)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of dimensions that data may have: 2 for blocks of one row, else 2 or 3."""
        return (2,) if self.rows == 1 else (2, 3)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of data of this ``shape``; partial blocks count."""
        *lead, rows, cols = shape
        return (*lead, ceil_div(rows, self.rows), ceil_div(cols, self.cols))

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of data of ``shape`` and of its fp32 scales, without padding."""
        return math.prod(shape) * self.dtype.itemsize + 4 * math.prod(self.scale_shape(shape))

    def __reduce__(self) -> tuple[Any, ...]:
        return named, (self.name,)  # a copy is the same object


class Quantized(NamedTuple):
    """A matrix or stack cast to a format: value = data * scale.

    Attributes:
        data: ``[..., R, C]`` in ``format.dtype``, contiguous along C, the contraction.
        scale: fp32, one number for each block, laid out by ``ops/scale_layouts.py``.
        format: the format of the blocks.
    """

    data: Tensor
    scale: Tensor
    format: BlockFormat


_FORMATS: dict[str, BlockFormat] = {}


def register(block_format: BlockFormat) -> BlockFormat:
    """Register a format under its name, which ops take as argument, and return it.

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


def _of_each_rounding(rows: int) -> dict[ScaleRounding, BlockFormat]:
    """Register formats with blocks of ``rows`` rows."""
    return {
        name: register(BlockFormat(f"{rows}x{BLOCK}{rounding.suffix}", (rows, BLOCK), name))
        for name, rounding in ROUNDINGS.items()
    }


ACTIVATION_FORMATS = _of_each_rounding(1)
"""The formats of activations and gradients, by the rounding of scales."""

WEIGHT_FORMATS = _of_each_rounding(BLOCK)
"""The formats of weights, by the rounding of scales."""

BLOCKS_1X128, BLOCKS_1X128_POW2 = (ACTIVATION_FORMATS[x] for x in ("fp32", "power_of_two"))
BLOCKS_128X128, BLOCKS_128X128_POW2 = (WEIGHT_FORMATS[x] for x in ("fp32", "power_of_two"))

GRID_FORMATS: dict[WeightGrid, BlockFormat] = {
    "mxfp4": register(
        BlockFormat(
            f"{BLOCK}x{BLOCK}_mxfp4",
            (BLOCK, BLOCK),
            "power_of_two",
            mxfp4_group=(1, MXFP4_GROUP),
        )
    ),
    "mxfp4_kn": register(
        BlockFormat(
            f"{BLOCK}x{BLOCK}_mxfp4_kn",
            (BLOCK, BLOCK),
            "power_of_two",
            mxfp4_group=(MXFP4_GROUP, 1),
        )
    ),
}
"""The formats of casts of weights to a grid: of weights ``[..., N, K]`` and ``[..., K, N]``."""

KERNEL_FORMATS = (*ACTIVATION_FORMATS.values(), *WEIGHT_FORMATS.values())
"""The formats that matmuls in kernels read; others run in the reference."""

CAST_FORMATS = (
    *(x for x in KERNEL_FORMATS if ROUNDINGS[x.scale_rounding].in_kernels),
    *GRID_FORMATS.values(),
)
"""The formats that casts in kernels write; others are cast by the reference."""


def with_block_shape(block_shape: Sequence[int], scale_rounding: ScaleRounding) -> BlockFormat:
    """Return the registered e4m3 format with these blocks and rounding of scales.

    Raises:
        ValueError: there is none.
    """
    wanted = tuple(block_shape), scale_rounding, torch.float8_e4m3fn
    for format in _FORMATS.values():
        is_wanted = (format.block_shape, format.scale_rounding, format.dtype) == wanted
        if is_wanted and format.mxfp4_group is None:
            return format
    raise ValueError(
        f"block_shape {tuple(block_shape)}: expected {BLOCKS_1X128.block_shape} (activations, "
        f"gradients) or {BLOCKS_128X128.block_shape} (weights)"
    )
