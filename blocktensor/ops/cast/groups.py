"""Find blocks of tokens in groups on the device; plan grids and outputs of casts on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..formats import BlockFormat, Quantized, group_blocks, num_blocks
from ..runtime.launch import Launch
from ..scale_layouts import empty_columnwise, empty_quantized
from .producer import Forms, empty_forms


@triton.jit
def rows_of_block(block, offs_ptr, groups, tokens, GROUPS: tl.constexpr):
    # As `place`; without GROUPS all rows are of the first group.
    if GROUPS == 0:
        first = block * 128
        return first, tokens - first, first < tokens, block * 0
    else:
        group = tl.arange(0, GROUPS)
        end = tl.load(offs_ptr + group, mask=group < groups, other=0)
        begin = tl.load(offs_ptr + group - 1, mask=(group > 0) & (group < groups), other=0)
        return place(block, group, begin, end, tokens)


@triton.jit
def place(block, group, begin, end, tokens):
    # `begin` and `end` of each group, zeros beyond the last one. Blocks after the last group's hold
    # the rows of no group. Returns the first row, the rows left, whether they are of a group, and
    # which. Every program makes this search: a number that it does not use costs nothing.
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


Planner = Callable[..., Launch]
"""A function that plans the cast of a tensor into a rowwise and a columnwise form; one may be None.

With the ends of groups of rows as the fourth argument, blocks of the columnwise form begin anew in
every group.
"""


def padded_groups(groups: int) -> int:
    """Return ``groups`` rounded up to the size of a vector in kernels; 0 without groups."""
    return max(32, triton.next_power_of_2(groups)) if groups else 0


def blocks_of(x: Tensor, groups: int, rowwise: bool) -> int:
    """Return the most blocks that the rows of ``x`` take; rowwise, including rows of no group."""
    return group_blocks(len(x), groups + rowwise) if groups else num_blocks(len(x))


def _never(x: Tensor, row: Quantized, col: Quantized, offs: Tensor | None) -> bool:
    return False


@dataclass(eq=False)
class Casts:
    """Launch the casts of ``ops/reference.py`` that write a columnwise form of tokens.

    Attributes:
        plan: plans the launch of the kernel, which reads ``x`` once.
        rowwise: plans the launch of a kernel that writes the rowwise form alone.
        splits: tells whether to cast ``x`` to the two forms in two launches.
    """

    plan: Planner
    rowwise: Planner
    splits: Callable[[Tensor, Quantized, Quantized, Tensor | None], bool] = _never

    def quantize_columnwise(self, x: Tensor, format: BlockFormat) -> Quantized:
        """See :func:`blocktensor.ops.reference.quantize_columnwise`."""
        col = empty_columnwise(x, format)
        self._cast(x, None, col, None)
        return col

    def quantize_both(
        self, x: Tensor, format: BlockFormat, columnwise_format: BlockFormat | None = None
    ) -> tuple[Quantized, Quantized]:
        """See :func:`blocktensor.ops.reference.quantize_both`."""
        row = empty_quantized(x.shape, format, x.device)
        col = empty_columnwise(x, columnwise_format or format)
        self._cast(x, row, col, None)
        return row, col

    def quantize_grouped(
        self, x: Tensor, offs: Tensor, rowwise: BlockFormat | None, columnwise: BlockFormat | None
    ) -> Forms:
        """See :func:`blocktensor.ops.reference.quantize_grouped`."""
        row, col = made = empty_forms(x, offs, rowwise, columnwise)
        self._cast(x, row, col, offs)
        return made

    def _cast(
        self, x: Tensor, row: Quantized | None, col: Quantized | None, offs: Tensor | None
    ) -> None:
        if col is None:
            self.rowwise(x, row, None, offs)()
        elif row is not None and self.splits(x, row, col, offs):
            self.rowwise(x, row, None, offs)()
            self.plan(x, None, col, offs)()
        else:
            self.plan(x, row, col, offs)()
