"""Derive the columnwise form of tokens from rowwise bytes: the Triton kernel and its launcher."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import BLOCK, BlockFormat, Quantized, num_blocks
from ..runtime.launch import Launch, Rows
from ..scale_layouts import empty_columnwise, laid_out
from .groups import blocks_of, padded_groups, rows_of_block
from .numerics import INF_BITS, divisor, is_wide, magnitude_bits, scale_from_bits

NAN_BITS = tl.constexpr(0x7FC00000)
TWO_127 = tl.constexpr(2.0**127)


@triton.jit
def _known(amax_bits):
    # NaN for a block with a value that fp32 does not hold
    return tl.where(amax_bits < INF_BITS, amax_bits, NAN_BITS)


@triton.jit(do_not_specialize=["rows", "scale_ld", "col_scale_ld", "blocks_k", "groups", "columns"])
def columnwise_kernel(
    data_ptr, scale_ptr, col_ptr, col_scale_ptr, rows, cols, stride_m, scale_ld, out_ld,
    col_scale_ld, blocks_k, offs_ptr, groups, columns, SQUARE: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    # One program reads the bytes [128, 128] of a block of rows, and writes their columnwise form.
    # Arguments are as in cast_1x128_kernel.
    tile = tl.program_id(0)
    tile_m = tile // blocks_k
    tile_k = tile % blocks_k
    m = tl.arange(0, 128)
    k = tl.arange(0, 128)
    if WIDE:  # offsets inside a tile pass 2^31
        m = m.to(tl.int64)
    col_m = tile_m.to(tl.int64) * 128
    if GROUPS:
        first_m, rows_left, has_group, _ = rows_of_block(tile_m, offs_ptr, groups, rows, GROUPS)
        first_m = first_m.to(tl.int64)
        col_left = tl.where(has_group & (tile_m * 128 < columns), 128, 0)
        if col_left == 0:
            return
    else:
        first_m = col_m
        rows_left = rows - tile_m * 128
        col_left = columns - tile_m * 128
    cols_left = cols - tile_k * 128
    first_k = tile_k.to(tl.int64) * 128
    source = data_ptr + first_m * stride_m + first_k + (m[:, None] * stride_m + k[None, :])
    scales = scale_ptr + tile_k.to(tl.int64) * scale_ld + first_m + m
    if EVEN:
        data = tl.load(source)
        scale = tl.load(scales)
    else:
        inside = (m < rows_left)[:, None] & (k < cols_left)[None, :]
        data = tl.load(source, mask=inside, other=0)
        scale = tl.load(scales, mask=m < rows_left, other=1.0)

    x = data.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if SQUARE:  # magnitudes of bytes are ordered like numbers, with NaN above all
        largest = tl.max(data & 0x7F, 1).to(tl.int8).to(tl.float8e4nv, bitcast=True)
        amax = _known(tl.max(magnitude_bits(largest.to(tl.float32) * scale), 0))
        col_scale = scale_from_bits(amax, "refined", True)
        place = col_scale_ptr + tile_k.to(tl.int64) * col_scale_ld + tile_m
        tl.store(place, col_scale, mask=col_left > 0)
        _, r, _ = divisor(amax, col_scale, "refined", True)
        shift = scale * r
        # of zeros: finite, so that they stay zeros
        q = x * tl.where(shift > TWO_127, TWO_127, shift)[:, None]
    else:
        x = x * scale[:, None]
        amax = _known(tl.max(magnitude_bits(x), 0))
        col_scale = scale_from_bits(amax, "refined", True)  # [128]
        tl.store(
            col_scale_ptr + tile_m.to(tl.int64) * col_scale_ld + first_k + k,
            col_scale,
            mask=k < cols_left,
        )
        _, r, _ = divisor(amax, col_scale, "refined", True)
        q = x * r[None, :]
    q = q.to(tl.float8e4nv)
    target = col_ptr + first_k * out_ld + col_m + (k.to(tl.int64)[:, None] * out_ld + m[None, :])
    if EVEN:
        tl.store(target, tl.trans(q))
    else:
        tl.store(target, tl.trans(q), mask=(k < cols_left)[:, None] & (m < col_left)[None, :])


def plan_columnwise_from_rowwise(x: Quantized, col: Quantized, offs: Tensor | None) -> Launch:
    """Plan the launch that writes the columnwise form of ``x[M, K]`` into ``col``."""
    data, scale, _ = x
    m, k = data.shape
    groups = 0 if offs is None else offs.shape[0]
    columns, square = col.data.shape[1], col.format.transposes
    return Launch(
        columnwise_kernel,
        (blocks_of(data, groups, False) * num_blocks(k),),
        (data.view(torch.int8), scale, col.data, col.scale, Rows(m), k, data.stride(0),
         scale.stride(1), columns, col.scale.stride(0 if square else 1), num_blocks(k),
         scale if offs is None else offs, groups, columns),
        {
            "SQUARE": square,
            "EVEN": offs is None and m % BLOCK == 0 and k % BLOCK == 0,
            "WIDE": is_wide(data.stride(0), columns),
            "GROUPS": padded_groups(groups),
        },
        {"num_warps": 8, "enable_fp_fusion": True},
    )  # fmt: skip


def columnwise_from_rowwise(
    x: Quantized, columnwise: BlockFormat, offs: Tensor | None = None
) -> Quantized:
    """See :func:`blocktensor.ops.reference.columnwise_from_rowwise`."""
    if x.data.stride(1) != 1:
        x = x._replace(data=x.data.contiguous())
    if x.scale.stride(0) != 1:
        x = x._replace(scale=laid_out(*x).scale)
    col = empty_columnwise(x.data, columnwise, offs)
    plan_columnwise_from_rowwise(x, col, offs)()
    return col
