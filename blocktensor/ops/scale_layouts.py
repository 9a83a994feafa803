"""Define the memory layouts of FP8 data and scales: only this file decides strides and padding.

Data is contiguous. A columnwise cast of an activation or gradient ends in zeros, as if x had more
rows of zeros: ``[K, M]`` has M rounded up to a multiple of 64 (:func:`columnwise_width`). So casts
store whole vectors and GEMMs read rows without a copy, for any number of tokens M. The zeros add
nothing to a contraction, and there are no additional blocks. The columnwise form of a weight is the
transpose of its rowwise form, not a cast, and has no zeros.

There are two layouts of scales, which TMA and cuBLAS can read without a copy:

- blocks of one row: logical ``[R, C/cols]``, **column-major**, leading dimension padded to a
  multiple of 64 (TMA needs 16-byte strides; with more, few strides occur);
- blocks of several rows: logical ``[..., R/rows, C/cols]``, row-major, row stride padded to a
  multiple of 4; in a columnwise cast, to the first multiple beyond ``C/cols``.

The padding of scales is never read as a value and may hold anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .formats import (
    ROW_STEP,
    BlockFormat,
    Quantized,
    ceil_div,
    group_columns,
    group_rows,
    padded_rows,
)

VECTOR_BYTES = 16
"""TMA addresses rows, and kernels load them, in units of this number of bytes."""


def padded_to_vectors(size: int) -> int:
    """Return ``size`` rounded up to a multiple of 16 e4m3 numbers, i.e. bytes."""
    return ceil_div(size, VECTOR_BYTES) * VECTOR_BYTES


def columnwise_width(tokens: int, format: BlockFormat) -> int:
    """Return the columns of the columnwise cast of ``tokens`` rows; zeros follow the tokens."""
    if format.cols % ROW_STEP == 0:
        return padded_rows(tokens)
    return padded_to_vectors(tokens) if format.cols % VECTOR_BYTES == 0 else tokens


def pad4(size: int) -> int:
    """Return ``size`` rounded up to a multiple of 4 floats, i.e. 16 bytes."""
    return ceil_div(size, 4) * 4


def empty_scale(shape: Sequence[int], format: BlockFormat, device: torch.device) -> Tensor:
    """Return uninitialised scales of data of ``shape`` ``[..., R, C]`` in ``format``."""
    *lead, rows, cols = format.scale_shape(shape)
    if format.rows > 1:
        buffer = torch.empty((*lead, rows, pad4(cols)), dtype=torch.float32, device=device)
        if not isinstance(cols, int):  # symbolic, while tracing: the same strides without a branch
            return buffer.as_strided((*lead, rows, cols), buffer.stride())
        return buffer if cols % 4 == 0 else buffer[..., :cols]
    padded = padded_rows(rows)
    if not isinstance(rows, int):  # symbolic, as above
        return torch.empty_strided((rows, cols), (1, padded), dtype=torch.float32, device=device)
    if padded == rows:  # one call instead of three, to save host time
        return torch.empty_strided((rows, cols), (1, rows), dtype=torch.float32, device=device)
    return torch.empty((cols, padded), dtype=torch.float32, device=device).t()[:rows]


def scale_of_lines(lines: Tensor) -> Tensor:
    """Return scales ``[R, blocks]`` of blocks of one row, of the contiguous ``[blocks, R]``."""
    rows = lines.shape[1]
    padded = padded_rows(rows)
    if type(rows) is int and padded == rows:  # symbolic while tracing: the same without a branch
        return lines.t()
    return scale_in_lines(torch.nn.functional.pad(lines, (0, padded - rows)), rows)


def lines_of(scale: Tensor) -> Tensor:
    """Return all memory of the scales of :func:`empty_scale` ``[R, blocks]`` of blocks of one row.

    It is ``[blocks, padded R]``, as large for all R of a step; :func:`scale_in_lines` reverses it.
    """
    padded = scale.stride(1)
    return scale.as_strided((scale.shape[1], padded), (padded, 1))


def scale_in_lines(lines: Tensor, rows: int) -> Tensor:
    """Return the scales ``[rows, blocks]`` in the memory of :func:`lines_of`."""
    blocks, padded = lines.shape
    return lines.as_strided((rows, blocks), (1, padded))


def empty_quantized(shape: Sequence[int], format: BlockFormat, device: torch.device) -> Quantized:
    """Return uninitialised data of ``shape`` ``[..., R, C]`` and its scales."""
    data = torch.empty(tuple(shape), dtype=format.dtype, device=device)
    return Quantized(data, empty_scale(shape, format, device), format.stored)


def empty_columnwise(x: Tensor, format: BlockFormat, offs: Tensor | None = None) -> Quantized:
    """Return uninitialised data and scales of the columnwise cast of ``x[M, K]``.

    With ``offs``, blocks begin anew in every group of rows.
    """
    m, k = x.shape
    width = columnwise_width(m, format) if offs is None else group_columns(m, offs.shape[0])
    if format.rows == 1:
        return empty_quantized((k, width), format, x.device)
    data = torch.empty((k, width), dtype=format.dtype, device=x.device)
    rows, cols = format.scale_shape((k, width))
    # Always one number more: with 4, 8, ... blocks of tokens the scales would otherwise be
    # contiguous, for which compilers create another graph
    stride = pad4(cols + 1), 1
    scale = torch.empty_strided((rows, cols), stride, dtype=torch.float32, device=x.device)
    return Quantized(data, scale, format.stored)


def copy_data_(target: Tensor, source: Tensor, non_blocking: bool = False) -> None:
    """Copy the data of a matrix; source or target may have the zeros of a columnwise cast."""
    width = min(target.shape[-1], source.shape[-1])
    target[..., width:].view(torch.uint8).zero_()
    target[..., :width].copy_(source[..., :width], non_blocking=non_blocking)


def laid_out(data: Tensor, scale: Tensor, format: BlockFormat) -> Quantized:
    """Return data and scales in the layouts that ops expect; copy scales with other strides."""
    wanted = empty_scale(data.shape, format, scale.device)
    fits = scale.stride() == wanted.stride()
    return Quantized(data, scale if fits else wanted.copy_(scale), format)


def empty_with_room(tokens: int, k: int, format: BlockFormat, device: torch.device) -> Quantized:
    """Return uninitialised ``[T, K]`` in blocks of one row, for :func:`in_group_steps`."""
    x = empty_quantized((group_rows(tokens), k), format, device)
    return Quantized(x.data[:tokens], x.scale[:tokens], format)


def in_group_steps(x: Quantized) -> Quantized:
    """Return ``x[T, K]`` in blocks of one row, with as many rows as a cast in groups.

    The rows from T on may hold anything. Memory that follows ``x`` is used, else ``x`` is copied.
    """
    (tokens, k), rows = x.data.shape, group_rows(x.data.shape[0])
    data = _with_rows_behind(x.data, rows, (k, 1))
    scale = _with_rows_behind(x.scale, rows, (1, rows))
    if data is None:
        data = torch.empty((rows, k), dtype=x.data.dtype, device=x.data.device)
        data[:tokens] = x.data
    if scale is None:
        scale = empty_scale((rows, k), x.format, x.scale.device)
        scale[:tokens] = x.scale
    return Quantized(data, scale, x.format)


def _with_rows_behind(x: Tensor, rows: int, strides: tuple[int, int]) -> Tensor | None:
    """Return ``x`` with the rows that follow in memory; None if it has other strides or no room."""
    if x.stride() != strides:
        return None
    last = x.storage_offset() + (rows - 1) * strides[0] + (x.shape[1] - 1) * strides[1]
    if rows and (last + 1) * x.itemsize > x.untyped_storage().nbytes():
        return None
    return x.as_strided((rows, x.shape[1]), strides)


def cublas_scale(operand: Quantized) -> Tensor:
    """Return scales of a matrix as cuBLAS reads them.

    1x128 blocks: ``[R, blocks]`` with strides exactly ``(1, R)``; a view where R % 4 == 0, else a
    copy. 128x128 blocks: K-major, ``[pad4(K/128), R/128]``; a view of the padded rows that
    :func:`empty_scale` lays out, anything else (a slice from elsewhere) is copied, with zeros in
    the padding.
    """
    scale = operand.scale
    rows, cols = scale.shape
    if operand.format.rows == 1:
        if scale.stride() == (1, rows):
            return scale
        return torch.empty((cols, rows), dtype=scale.dtype, device=scale.device).t().copy_(scale)
    padded = pad4(cols)
    if scale.stride() == (padded, 1):
        storage_end = scale.storage_offset() + rows * padded
        if storage_end * scale.element_size() <= scale.untyped_storage().nbytes():
            return scale.as_strided((padded, rows), (1, padded))
    buffer = torch.zeros((rows, padded), dtype=scale.dtype, device=scale.device)
    buffer[:, :cols] = scale
    return buffer.t()


def tma_scale(operand: Quantized) -> Tensor:
    """Return scales of a matrix as TMA reads them: lines 16 bytes apart; a copy where needed.

    A line is a column of 1x128 scales and a row of 128x128 scales.
    """
    scale, by_columns = operand.scale, operand.format.rows == 1
    lines = scale.t() if by_columns else scale  # [lines, numbers in a line]
    count, size = lines.shape
    fits = (size == 1 or lines.stride(1) == 1) and (count == 1 or lines.stride(0) % 4 == 0)
    if fits and lines.stride(0) >= size and scale.data_ptr() % VECTOR_BYTES == 0:
        return scale
    return empty_scale(operand.data.shape, operand.format, scale.device).copy_(scale)


def stacked_scale(scale: Tensor) -> Tensor:
    """Return 128x128 scales of a stack as TMA reads them: one matrix of lines."""
    experts, rows, cols = scale.shape
    ld = scale.stride(1)
    is_matrix = ld % 4 == 0 and ld >= cols and scale.stride() == (rows * ld, ld, 1)
    if is_matrix and scale.data_ptr() % VECTOR_BYTES == 0:
        return scale
    made = torch.empty((experts, rows, pad4(cols)), dtype=scale.dtype, device=scale.device)
    return made[..., :cols].copy_(scale)


def in_vectors(data: Tensor, least: int = 0) -> Tensor:
    """Return ``data[R, K]`` in rows of whole 16-byte vectors, zero-padded; copied if needed.

    ``least``: the least number of columns, if there are fewer now.
    """
    k = data.shape[1]
    wanted = max(padded_to_vectors(k), padded_to_vectors(least))
    if k != wanted:
        as_bytes = data.view(torch.uint8)
        return torch.nn.functional.pad(as_bytes, (0, wanted - k)).view(data.dtype)
    return data if data.data_ptr() % VECTOR_BYTES == 0 else data.clone()
