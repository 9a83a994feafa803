"""Cast a matrix or a part of one in 128x128 blocks: Triton kernel and launchers.

A part is a rank's share of a sharded weight: its first block may begin before it, and its last
block may end after it. Results equal ``ops/reference.py`` byte for byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import BLOCK, BlockFormat, Quantized, num_blocks
from ..runtime.launch import Launch
from .numerics import (
    divisor,
    is_wide,
    magnitude_bits,
    method_for,
    on_grid,
    quotient,
    scale_from_bits,
)


@triton.jit(do_not_specialize=["rows", "cols", "row", "col", "blocks_n", "blocks_k"])
def block_kernel(
    x_ptr, block_ptr, data_ptr, own_ptr, rows, cols, row, col, stride_e, stride_n, stride_k, out_ld,
    block_stride_e, block_ld, own_stride_e, own_ld, blocks_n, blocks_k, MODE: tl.constexpr,
    EVEN_ROWS: tl.constexpr, EVEN_COLS: tl.constexpr, WIDE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, METHOD: tl.constexpr, GROUP_ROWS: tl.constexpr,
    GROUP_COLS: tl.constexpr,
):  # fmt: skip
    # One program handles one block of one matrix of the stack. MODE "amax": it writes the amax of
    # the block's elements in x. "shard": it casts them by the amax of the whole block. "checked":
    # the same, or NaN if the amax of its elements is not the one at own_ptr. "whole": it casts the
    # block by its own amax and writes the scale. EVEN_ROWS (EVEN_COLS): x begins and ends
    # at block boundaries, so that no mask depends on run-time values and loads stay wide.
    # GROUP_ROWS, GROUP_COLS: the groups of the grid to which values are rounded first; 0 for none.
    # Parts begin and end at groups. out_ld = cols, a separate argument so that its divisibility by
    # 16 is specialised.
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
    if not EVEN_ROWS:
        first_n -= row
        rows_in = n < rows + row - block_n * 128
        if MODE != "whole":  # the block may begin before the part
            rows_in &= n >= row - block_n * 128
    if not EVEN_COLS:
        first_k -= col
        cols_in = k < cols + col - block_k * 128
        if MODE != "whole":
            cols_in &= k >= col - block_k * 128
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
    x = on_grid(x, GROUP_ROWS, GROUP_COLS)
    place = block_ptr + matrix * block_stride_e + block_n.to(tl.int64) * block_ld + block_k
    if MODE == "shard":
        amax = tl.load(place).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        amax = tl.max(tl.max(magnitude_bits(x), 1), 0)
    if MODE == "checked":
        own = own_ptr + matrix * own_stride_e + block_n.to(tl.int64) * own_ld + block_k
        same = amax == (tl.load(own).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        amax = tl.load(place).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        amax = tl.where(same, amax, 0x7FC00000)
    if MODE == "amax":
        tl.store(place, amax.to(tl.float32, bitcast=True))
    else:
        scale = scale_from_bits(amax, METHOD, POWER_OF_TWO)
        if MODE == "whole":
            tl.store(place, scale)
        pre, r, e = divisor(amax, scale, METHOD, POWER_OF_TWO)
        q = quotient(x.to(tl.float32), pre, r, e, METHOD, POWER_OF_TWO).to(tl.float8e4nv)
        target = data_ptr + (matrix * rows + first_n) * out_ld + first_k
        places = n[:, None] * out_ld + k[None, :]
        if EVEN_ROWS and EVEN_COLS:
            tl.store(target + places, q)
        else:
            tl.store(target + places, q, mask=inside)


def _plan(
    mode: str,
    x: Tensor,
    blocks: Tensor,
    data: Tensor | None,
    format: BlockFormat,
    row: int = 0,
    col: int = 0,
    own: Tensor | None = None,
) -> Launch:
    # `blocks` has the amax or the scale of each block
    rows, cols = x.shape[-2:]
    own = blocks if own is None else own
    group_rows, group_cols = format.mxfp4_group or (0, 0)
    in_stack = x.ndim == 3
    stride_e, block_stride_e, own_stride_e = (
        t.stride(0) if in_stack else 0 for t in (x, blocks, own)
    )
    blocks_n, blocks_k = num_blocks(row + rows), num_blocks(col + cols)
    even_cols = col == cols % BLOCK == 0
    wide = x.dtype == torch.float32
    wide_loads = even_cols and x.stride(-1) == 1
    far = is_wide(*x.stride()[-2:], cols)
    if group_rows:
        # 16-bit inputs: 8 warps leave room for one program on an SM. 64-bit offsets: 16 warps spill
        many = not (wide or far)
    else:
        many = wide or not wide_loads
    return Launch(
        block_kernel,
        ((x.shape[0] if in_stack else 1) * blocks_n * blocks_k,),
        (x, blocks, blocks if data is None else data, own, rows, cols, row, col, stride_e,
         x.stride(-2), x.stride(-1), cols, block_stride_e, blocks.stride(-2), own_stride_e,
         own.stride(-2), blocks_n, blocks_k),
        {
            "MODE": mode,
            "EVEN_ROWS": row == rows % BLOCK == 0,
            "EVEN_COLS": even_cols,
            "WIDE": far,
            "POWER_OF_TWO": mode != "amax" and format.power_of_two,
            "METHOD": method_for(x.dtype),
            "GROUP_ROWS": group_rows,
            "GROUP_COLS": group_cols,
        },
        {
            "num_warps": 16 if many else 8,
            "enable_fp_fusion": True,
        },
    )  # fmt: skip


def plan_128x128(x: Tensor, out: Quantized, format: BlockFormat) -> Launch:
    """Plan the launch that casts ``x[..., N, K]`` in ``format`` into ``out``."""
    return _plan("whole", x, out.scale, out.data, format)


def plan_shard(
    x: Tensor,
    amax: Tensor,
    data: Tensor | None,
    format: BlockFormat,
    row: int,
    col: int,
    own: Tensor | None = None,
) -> Launch:
    """Plan the launch that casts ``x`` into ``data`` or, without ``data``, writes ``amax``."""
    if data is None:
        return _plan("amax", x, amax, None, format, row, col)
    mode = "shard" if own is None else "checked"
    return _plan(mode, x, amax, data, format, row, col, own)


def shard_amax(x: Tensor, format: BlockFormat, row: int, col: int) -> Tensor:
    """See :func:`blocktensor.ops.reference.shard_amax`."""
    blocks = num_blocks(row + x.shape[-2]), num_blocks(col + x.shape[-1])
    amax = torch.empty((*x.shape[:-2], *blocks), dtype=torch.float32, device=x.device)
    plan_shard(x, amax, None, format, row, col)()
    return amax


def quantize_shard(
    x: Tensor, amax: Tensor, format: BlockFormat, row: int, col: int, own: Tensor | None = None
) -> Tensor:
    """See :func:`blocktensor.ops.reference.quantize_shard`."""
    data = torch.empty(x.shape, dtype=format.dtype, device=x.device)
    plan_shard(x, amax, data, format, row, col, own)()
    return data
