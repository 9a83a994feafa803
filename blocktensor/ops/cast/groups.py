"""Blocks of tokens in groups: their rows on the device, outputs and grids of casts on the host."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from ..formats import BlockFormat, Quantized, group_blocks, group_columns, num_blocks
from ..runtime.launch import Launch
from ..scale_layouts import empty_quantized


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


Planner = Callable[[Tensor, "Quantized | None", Quantized, Tensor], Launch]
"""Plans the cast of a tensor into a rowwise form (unless None) and a columnwise form, by groups."""


def padded_groups(groups: int) -> int:
    """Return the size of a tensor of ``groups`` numbers on the device; 0 for none."""
    return max(32, triton.next_power_of_2(groups)) if groups else 0


def blocks_of(tokens: int, groups: int, rowwise: bool) -> int:
    """Return the most blocks that ``tokens`` rows take; rowwise, with rows of no group."""
    return group_blocks(tokens, groups + rowwise) if groups else num_blocks(tokens)


def grouped_columnwise_by(plan: Planner, x: Tensor, offs: Tensor, format: BlockFormat) -> Quantized:
    """Return the columnwise form of tokens in groups, by the kernel that ``plan`` launches."""
    col = empty_grouped_columnwise(x, offs, format)
    plan(x, None, col, offs)()
    return col


def grouped_by(
    plan: Planner,
    x: Tensor,
    offs: Tensor,
    format: BlockFormat,
    columnwise_format: BlockFormat | None,
) -> tuple[Quantized, Quantized]:
    """Return both forms of tokens in groups, written by the kernel that ``plan`` launches."""
    row = empty_quantized(x.shape, format, x.device)
    col = empty_grouped_columnwise(x, offs, columnwise_format or format)
    plan(x, row, col, offs)()
    return row, col


def empty_grouped_columnwise(x: Tensor, offs: Tensor, format: BlockFormat) -> Quantized:
    """Return uninitialised data and scales of the columnwise cast of tokens in groups."""
    tokens, k = x.shape
    return empty_quantized((k, group_columns(tokens, offs.shape[0])), format, x.device)
