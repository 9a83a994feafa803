"""Block geometry and memory layouts of scales: the one place that knows strides and padding.

Two scale layouts exist, chosen so that TMA and cuBLAS can read them as they lie:

- 1x128 blocks of a matrix ``[R, C]``: logical ``[R, ceil(C/128)]``, **column-major**, leading
  dimension padded to a multiple of 4 (16-byte strides).
- 128x128 blocks of ``[..., R, C]``: logical ``[..., ceil(R/128), ceil(C/128)]``, row-major, row
  stride padded to a multiple of 4.

The padding is never read as a value and may hold anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 128
"""Edge of a block, in elements: the K of one promoted partial product."""

Form = tuple[Tensor, Tensor]
"""e4m3 data and its fp32 scales."""

ROWWISE_BLOCK = (1, BLOCK)
SQUARE_BLOCK = (BLOCK, BLOCK)


def ceil_div(a: int, b: int) -> int:
    """The number of blocks of ``b`` elements that cover ``a`` elements."""
    return -(-a // b)


def num_blocks(size: int) -> int:
    """The number of 128-wide blocks that cover ``size`` elements; a partial block counts."""
    return ceil_div(size, BLOCK)


def pad4(size: int) -> int:
    """``size`` rounded up to a multiple of 4 floats, i.e. 16 bytes."""
    return ceil_div(size, 4) * 4


def empty_rowwise_scale(rows: int, cols: int, device: torch.device) -> Tensor:
    """Uninitialised fp32 scales of 1x128 blocks, ``[rows, ceil(cols/128)]``, column-major."""
    blocks, padded = num_blocks(cols), pad4(rows)
    if not isinstance(rows, int):  # a tracer's size: the same strides, and no branch on its value
        return torch.empty_strided((rows, blocks), (1, padded), dtype=torch.float32, device=device)
    if padded == rows:  # one call instead of three: allocations cost host time
        return torch.empty_strided((rows, blocks), (1, rows), dtype=torch.float32, device=device)
    return torch.empty((blocks, padded), dtype=torch.float32, device=device).t()[:rows]


def empty_rowwise_form(rows: int, cols: int, device: torch.device) -> Form:
    """Uninitialised e4m3 data ``[rows, cols]`` and the scales of its 1x128 blocks."""
    data = torch.empty((rows, cols), dtype=torch.float8_e4m3fn, device=device)
    return data, empty_rowwise_scale(rows, cols, device)


def empty_square_form(shape: Sequence[int], device: torch.device) -> Form:
    """Uninitialised e4m3 data of ``shape`` ``[..., R, C]`` and the scales of its 128x128 blocks."""
    data = torch.empty(tuple(shape), dtype=torch.float8_e4m3fn, device=device)
    return data, empty_square_scale(shape, device)


def empty_square_scale(shape: Sequence[int], device: torch.device) -> Tensor:
    """Uninitialised fp32 scales of the 128x128 blocks of a tensor of ``shape`` ``[..., R, C]``."""
    *lead, rows, cols = shape
    n_rows, n_cols = num_blocks(rows), num_blocks(cols)
    buffer = torch.empty((*lead, n_rows, pad4(n_cols)), dtype=torch.float32, device=device)
    return buffer if n_cols % 4 == 0 else buffer[..., :n_cols]


def square_scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Logical shape of the 128x128 scales of a matrix (or stack) of ``shape`` [..., R, C]."""
    *lead, rows, cols = shape
    return (*lead, num_blocks(rows), num_blocks(cols))


def square_form_bytes(shape: Sequence[int]) -> int:
    """What a matrix (or stack) of ``shape`` takes in e4m3 with 128x128 scales, unpadded."""
    return math.prod(shape) + 4 * math.prod(square_scale_shape(shape))


def rows_per_scale(rows: int, scale: Tensor) -> int:
    """How many matrix rows share one scale row: 1 (1x128 blocks) or 128 (128x128 blocks).

    A matrix of one row has the same scales either way.
    """
    return 1 if scale.shape[-2] == rows else BLOCK


def cublas_rowwise_scale(scale: Tensor) -> Tensor:
    """1x128 scales as cuBLAS wants them: ``[R, blocks]`` with strides exactly ``(1, R)``.

    A view where the leading dimension needed no padding (R % 4 == 0), else a copy.
    """
    rows, blocks = scale.shape
    if scale.stride() == (1, rows):
        return scale
    return torch.empty((blocks, rows), dtype=scale.dtype, device=scale.device).t().copy_(scale)


def cublas_square_scale(scale: Tensor) -> Tensor:
    """128x128 scales ``[R/128, K/128]`` as cuBLAS wants them: K-major, ``[pad4(K/128), R/128]``.

    A view of the padded rows that :func:`empty_square_scale` lays out; anything else (a slice that
    came from elsewhere) is copied, with zeros in the padding.
    """
    n_rows, n_cols = scale.shape
    padded = pad4(n_cols)
    if scale.stride() == (padded, 1):
        storage_end = scale.storage_offset() + n_rows * padded
        if storage_end * scale.element_size() <= scale.untyped_storage().nbytes():
            return scale.as_strided((padded, n_rows), (1, padded))
    buffer = torch.zeros((n_rows, padded), dtype=scale.dtype, device=scale.device)
    buffer[:, :n_cols] = scale
    return buffer.t()


def tma_rowwise_scale(scale: Tensor) -> Tensor:
    """1x128 scales as TMA reads them: column-major, columns 16 bytes apart; a copy where needed."""
    rows, blocks = scale.shape
    fits = (rows == 1 or scale.stride(0) == 1) and (blocks == 1 or scale.stride(1) % 4 == 0)
    if fits and scale.stride(1) >= rows and scale.data_ptr() % 16 == 0:
        return scale
    return empty_rowwise_scale(rows, blocks * BLOCK, scale.device).copy_(scale)


def tma_square_scale(scale: Tensor) -> Tensor:
    """128x128 scales as TMA reads them: row-major, rows 16 bytes apart; a copy where needed."""
    rows, blocks = scale.shape
    fits = (blocks == 1 or scale.stride(1) == 1) and (rows == 1 or scale.stride(0) % 4 == 0)
    if fits and scale.stride(0) >= blocks and scale.data_ptr() % 16 == 0:
        return scale
    return empty_square_scale((rows * BLOCK, blocks * BLOCK), scale.device).copy_(scale)


def vectorisable(data: Tensor) -> Tensor:
    """``data[R, K]``, zero-padded to K % 16 == 0 and 16-byte aligned; a copy only where needed."""
    k = data.shape[1]
    if k % 16:
        return torch.nn.functional.pad(data.view(torch.uint8), (0, -k % 16)).view(data.dtype)
    return data if data.data_ptr() % 16 == 0 else data.clone()
