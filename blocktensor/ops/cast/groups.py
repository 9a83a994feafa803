"""Blocks of tokens in groups: rows on the device, grids and outputs of casts on the host."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from ..formats import BlockFormat, Quantized, group_blocks, num_blocks
from ..runtime.launch import Launch
from ..scale_layouts import empty_columnwise, empty_quantized


@triton.jit
def rows_of_block(block, offs_ptr, groups, tokens, GROUPS: tl.constexpr):
    group = tl.arange(0, GROUPS)
    end = tl.load(offs_ptr + group, mask=group < groups, other=0)
    begin = tl.load(offs_ptr + group - 1, mask=(group > 0) & (group < groups), other=0)
    return place(block, group, begin, end, tokens)


@triton.jit
def place(block, group, begin, end, tokens):
    # `begin` and `end` of each group, zeros beyond the last one. Blocks after those of all groups
    # hold the rows of no group. Returns the first row, the rows left, whether they are of a group,
    # and which. Every program makes this search: a number that it does not use costs nothing.
    end = tl.maximum(tl.minimum(end, tokens), 0)
    begin = tl.maximum(tl.minimum(begin, end), 0)
    blocks = (end - begin + 127) // 128
    after = tl.cumsum(blocks, 0)
    within = (block - (after - blocks)) * 128
    mine = (within >= 0) & (block < after)
    first = tl.max(tl.where(mine, begin + within, -1), 0)
    left = tl.max(tl.where(mine, end - begin - within, 0), 0)
    found = left > 0
    if not found:
        first = tl.max(end, 0) + (block - tl.max(after, 0)) * 128
        left = tokens - first
    return first, left, found, tl.max(tl.where(mine, group, 0), 0)


Planner = Callable[[Tensor, "Quantized | None", Quantized, "Tensor | None"], Launch]
"""Plans the cast of a tensor into a rowwise form (unless None) and a columnwise form."""


def padded_groups(groups: int) -> int:
    """Return the size of a tensor of ``groups`` numbers on the device; 0 for none."""
    return max(32, triton.next_power_of_2(groups)) if groups else 0


def blocks_of(tokens: int, groups: int, rowwise: bool) -> int:
    """Return the most blocks that ``tokens`` rows take; rowwise, with rows of no group."""
    return group_blocks(tokens, groups + rowwise) if groups else num_blocks(tokens)


def columnwise_by(
    plan: Planner, x: Tensor, format: BlockFormat, offs: Tensor | None = None
) -> Quantized:
    """Return the columnwise form of ``x[M, K]``, written by the kernel that ``plan`` launches.

    With ``offs``, its blocks begin anew in every group of rows.
    """
    col = empty_columnwise(x, format, offs)
    plan(x, None, col, offs)()
    return col


def both_by(
    plan: Planner,
    x: Tensor,
    format: BlockFormat,
    columnwise_format: BlockFormat | None,
    offs: Tensor | None = None,
) -> tuple[Quantized, Quantized]:
    """Return both forms of ``x[M, K]``, the columnwise one as :func:`columnwise_by`."""
    row = empty_quantized(x.shape, format, x.device)
    col = empty_columnwise(x, columnwise_format or format, offs)
    plan(x, row, col, offs)()
    return row, col
