"""Casts of a part of a matrix in the 128x128 blocks of the whole: Triton kernels and launchers.

Every launcher has the signature and, byte for byte, the result of its namesake in
``ops/reference.py``. A part is the rows that a rank holds of a sharded weight: its first block may
begin before it, and its last block may end behind it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import BLOCK, BlockFormat, num_blocks
from ..runtime.launch import Launch
from .numerics import divisor, magnitude_bits, quotient, scale_from_bits
from .triton_cast import is_wide, method_for


@triton.jit(do_not_specialize=["rows", "cols", "row", "col", "blocks_n", "blocks_k"])
def part_kernel(
    x_ptr,
    amax_ptr,
    data_ptr,
    rows,
    cols,
    row,
    col,
    stride_e,
    stride_n,
    stride_k,
    out_ld,
    amax_stride_e,
    amax_ld,
    blocks_n,
    blocks_k,
    CAST: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    EVEN_COLS: tl.constexpr,
    WIDE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    METHOD: tl.constexpr,
):
    # One program has one block of one matrix of the stack: it writes the amax of what of the block
    # is here, or casts that by the amax of the whole block. Even rows (columns): the part begins
    # and ends with blocks; nothing is then masked by what is only known at run time, and loads stay
    # wide. out_ld = cols, told apart so that its divisibility by 16 is specialised.
    block = tl.program_id(0)
    block_k = block % blocks_k
    block_n = block // blocks_k % blocks_n
    matrix = (block // (blocks_k * blocks_n)).to(tl.int64)
    n = tl.arange(0, 128)
    k = tl.arange(0, 128)
    first_n = block_n.to(tl.int64) * 128
    first_k = block_k.to(tl.int64) * 128
    rows_in = tl.full([128], 1, tl.int1)
    cols_in = tl.full([128], 1, tl.int1)
    if not EVEN_ROWS:  # the block may begin before the part
        first_n -= row
        rows_in = (first_n + n >= 0) & (first_n + n < rows)
    if not EVEN_COLS:
        first_k -= col
        cols_in = (first_k + k >= 0) & (first_k + k < cols)
    inside = rows_in[:, None] & cols_in[None, :]
    if WIDE:
        n = n.to(tl.int64)
        k = k.to(tl.int64)
    source = x_ptr + matrix * stride_e + first_n * stride_n + first_k * stride_k
    offsets = n[:, None] * stride_n + k[None, :] * stride_k
    if EVEN_ROWS and EVEN_COLS:
        x = tl.load(source + offsets)
    else:
        x = tl.load(source + offsets, mask=inside, other=0.0)
    place = amax_ptr + matrix * amax_stride_e + block_n.to(tl.int64) * amax_ld + block_k
    if CAST:
        amax = tl.load(place).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        scale = scale_from_bits(amax, METHOD, POWER_OF_TWO)
        pre, r, e = divisor(amax, scale, METHOD, POWER_OF_TWO)
        q = quotient(x.to(tl.float32), pre, r, e, METHOD, POWER_OF_TWO).to(tl.float8e4nv)
        target = data_ptr + (matrix * rows + first_n) * out_ld + first_k
        places = n[:, None] * out_ld + k[None, :]
        if EVEN_ROWS and EVEN_COLS:
            tl.store(target + places, q)
        else:
            tl.store(target + places, q, mask=inside)
    else:
        amax = tl.max(tl.max(magnitude_bits(x), 1), 0)
        tl.store(place, amax.to(tl.float32, bitcast=True))


def plan_part(
    x: Tensor, amax: Tensor, data: Tensor | None, format: BlockFormat, row: int, col: int
) -> Launch:
    """The launch that casts ``x`` into ``data``, or without ``data`` writes ``amax``."""
    rows, cols = x.shape[-2:]
    stacked = x.ndim == 3
    blocks_n, blocks_k = num_blocks(row + rows), num_blocks(col + cols)
    args: tuple[Any, ...] = (
        x, amax, amax if data is None else data, rows, cols, row, col,
        x.stride(0) if stacked else 0, x.stride(-2), x.stride(-1), cols,
        amax.stride(0) if stacked else 0, amax.stride(-2), blocks_n, blocks_k,
    )  # fmt: skip
    constants = {
        "CAST": data is not None,
        "EVEN_ROWS": row == rows % BLOCK == 0,
        "EVEN_COLS": col == cols % BLOCK == 0,
        "WIDE": is_wide(*x.stride()[-2:], cols),
        "POWER_OF_TWO": data is not None and format.power_of_two,
        "METHOD": method_for(x.dtype),
    }
    programs = (x.shape[0] if stacked else 1) * blocks_n * blocks_k
    even = constants["EVEN_COLS"] and x.stride(-1) == 1
    warps = 16 if x.dtype == torch.float32 or not even else 8
    return Launch(part_kernel, (programs,), args, constants, {"num_warps": warps})


def part_amax(x: Tensor, format: BlockFormat, row: int, col: int) -> Tensor:
    """See :func:`blocktensor.ops.reference.part_amax`."""
    blocks = num_blocks(row + x.shape[-2]), num_blocks(col + x.shape[-1])
    amax = torch.empty((*x.shape[:-2], *blocks), dtype=torch.float32, device=x.device)
    plan_part(x, amax, None, format, row, col)()
    return amax


def quantize_part(x: Tensor, amax: Tensor, format: BlockFormat, row: int, col: int) -> Tensor:
    """See :func:`blocktensor.ops.reference.quantize_part`."""
    data = torch.empty(x.shape, dtype=format.dtype, device=x.device)
    plan_part(x, amax, data, format, row, col)()
    return data
