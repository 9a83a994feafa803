"""Casts of a part of a matrix in the 128x128 blocks of the whole: Triton kernels and launchers.

Every launcher has the signature and, byte for byte, the result of its namesake in
``ops/reference.py``. Parts are what a rank holds of a sharded weight: their blocks may begin before
them and end behind them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layouts import num_blocks
from .launch import Launch
from .numerics import divisor, magnitude_bits, quotient, scale_from_bits
from .replay import replayed


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
    amax_stride_e,
    amax_ld,
    blocks_n,
    blocks_k,
    CAST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    METHOD: tl.constexpr,
):
    # One program has one block of one matrix of the stack: it writes the amax of what of the block
    # is here, or casts that by the amax of the whole block.
    block = tl.program_id(0)
    block_k = block % blocks_k
    block_n = block // blocks_k % blocks_n
    matrix = (block // (blocks_k * blocks_n)).to(tl.int64)
    n = block_n.to(tl.int64) * 128 - row + tl.arange(0, 128)  # may be negative: before the part
    k = block_k.to(tl.int64) * 128 - col + tl.arange(0, 128)
    inside = ((n >= 0) & (n < rows))[:, None] & ((k >= 0) & (k < cols))[None, :]
    source = x_ptr + matrix * stride_e + n[:, None] * stride_n + k[None, :] * stride_k
    x = tl.load(source, mask=inside, other=0.0)
    place = amax_ptr + matrix * amax_stride_e + block_n.to(tl.int64) * amax_ld + block_k
    if CAST:
        amax = tl.load(place).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        scale = scale_from_bits(amax, METHOD, POWER_OF_TWO)
        pre, r, e = divisor(amax, scale, METHOD, POWER_OF_TWO)
        q = quotient(x.to(tl.float32), pre, r, e, METHOD, POWER_OF_TWO).to(tl.float8e4nv)
        target = data_ptr + (matrix * rows + n[:, None]) * cols + k[None, :]
        tl.store(target, q, mask=inside)
    else:
        amax = tl.max(tl.max(magnitude_bits(x), 1), 0)
        tl.store(place, amax.to(tl.float32, bitcast=True))


def plan_part(
    x: Tensor, amax: Tensor, data: Tensor | None, row: int, col: int, power_of_two: bool = False
) -> Launch:
    """The launch that casts ``x`` into ``data``, or without ``data`` writes ``amax``."""
    rows, cols = x.shape[-2:]
    stacked = x.ndim == 3
    blocks_n, blocks_k = num_blocks(row + rows), num_blocks(col + cols)
    args: tuple[Any, ...] = (
        x, amax, amax if data is None else data, rows, cols, row, col,
        x.stride(0) if stacked else 0, x.stride(-2), x.stride(-1),
        amax.stride(0) if stacked else 0, amax.stride(-2), blocks_n, blocks_k,
    )  # fmt: skip
    constants = {
        "CAST": data is not None,
        "POWER_OF_TWO": power_of_two,
        "METHOD": "refined" if x.dtype == torch.float32 else "corrected",
    }
    programs = (x.shape[0] if stacked else 1) * blocks_n * blocks_k
    return Launch(part_kernel, (programs,), args, constants, {"num_warps": 16})


@replayed
def part_amax(x: Tensor, row: int, col: int) -> Tensor:
    """See :func:`blocktensor.ops.reference.part_amax`."""
    blocks = num_blocks(row + x.shape[-2]), num_blocks(col + x.shape[-1])
    amax = torch.empty((*x.shape[:-2], *blocks), dtype=torch.float32, device=x.device)
    plan_part(x, amax, None, row, col)()
    return amax


@replayed
def quantize_part(x: Tensor, amax: Tensor, power_of_two: bool, row: int, col: int) -> Tensor:
    """See :func:`blocktensor.ops.reference.quantize_part`."""
    data = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    plan_part(x, amax, data, row, col, power_of_two)()
    return data
