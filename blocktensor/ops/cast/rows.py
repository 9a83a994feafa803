"""Move rows of casts in blocks of one row: pick them, and pack them for a collective.

Rows differ in number from call to call. Results have room for :func:`in_group_steps`, except while
a compiler traces.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import BlockFormat, Quantized
from ..runtime.specialize import must_dispatch
from ..scale_layouts import empty_with_room, scale_of_lines


def picked(x: Quantized, index: Tensor) -> Quantized:
    """Return the rows ``index[R]`` of ``x[T, K]``."""
    if must_dispatch(x.data):
        data = x.data.view(torch.uint8).index_select(0, index).view(x.data.dtype)
        return Quantized(data, scale_of_lines(x.scale.t().index_select(1, index)), x.format)
    made = empty_with_room(index.shape[0], x.data.shape[1], x.format, x.data.device)
    words = _word_of(x.data)
    torch.index_select(x.data.view(words), 0, index, out=made.data.view(words))
    torch.index_select(x.scale, 0, index, out=made.scale)
    return made


def packed(x: Quantized) -> Tensor:
    """Return the bytes ``[T, K + 4 * blocks]`` of ``x[T, K]``: each row, then its scales."""
    words, scale = _word_of(x.data), x.scale
    if words.itemsize != scale.itemsize:
        scale = scale.clone(memory_format=torch.contiguous_format)
    return torch.cat([x.data.view(words), scale.view(words)], 1).view(torch.uint8)


def unpacked(rows: Tensor, k: int, format: BlockFormat) -> Quantized:
    """Return the cast ``[T, K]`` whose bytes are ``rows``; see :func:`packed`."""
    if k == 0:
        return empty_with_room(rows.shape[0], k, format, rows.device)
    data, scale = rows[:, :k], rows[:, k:].contiguous().view(torch.float32)
    if must_dispatch(rows):
        lines = scale.t().contiguous()
        return Quantized(data.contiguous().view(format.dtype), scale_of_lines(lines), format)
    made = empty_with_room(rows.shape[0], k, format, rows.device)
    words = _word_of(rows)
    made.data.view(words).copy_(data.view(words))
    made.scale.copy_(scale)
    return made


def _word_of(data: Tensor) -> torch.dtype:
    """Return the dtype in which rows are copied: words, or bytes if rows are no whole words."""
    if must_dispatch(data):
        return torch.uint8  # compilers make copies of their own
    is_whole = data.shape[1] % 4 == data.stride(0) % 4 == data.storage_offset() % 4 == 0
    return torch.int32 if is_whole else torch.uint8
