"""Byte transpose and dequantize of finished casts: Triton kernels and their launchers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import BLOCK, Quantized, ceil_div, num_blocks
from ..reference import largest_fp32
from ..runtime.launch import Launch
from ..scale_layouts import empty_quantized


@triton.jit(do_not_specialize=["blocks_n", "blocks_k", "in_scale_ld", "out_scale_ld"])
def transpose_128x128_kernel(
    data_ptr, scale_ptr, out_ptr, out_scale_ptr, rows, cols, stride_e, stride_n, stride_k,
    scale_stride_e, blocks_n, blocks_k, in_scale_ld, out_scale_ld, EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    # One program transposes a 128x128 block of bytes and copies its scale.
    block = tl.program_id(0)
    block_k = block % blocks_k
    block_n = block // blocks_k % blocks_n
    matrix = (block // (blocks_k * blocks_n)).to(tl.int64)
    scale = tl.load(
        scale_ptr + matrix * scale_stride_e + block_n.to(tl.int64) * in_scale_ld + block_k
    )

    n = tl.arange(0, 128)
    k = tl.arange(0, 128)
    first_n = block_n.to(tl.int64) * 128
    first_k = block_k.to(tl.int64) * 128
    source = data_ptr + matrix * stride_e + first_n * stride_n + first_k * stride_k
    source += n.to(tl.int64)[:, None] * stride_n + k[None, :] * stride_k
    if WIDE:  # offsets inside a tile pass 2^31
        k = k.to(tl.int64)
    corner = out_ptr + (matrix * cols + first_k) * rows + first_n
    target = corner + (k[:, None] * rows + n[None, :])
    if EVEN:
        tl.store(target, tl.trans(tl.load(source)))
    else:
        n_inside = n < rows - block_n * 128
        k_inside = k < cols - block_k * 128
        tile = tl.load(source, mask=n_inside[:, None] & k_inside[None, :], other=0)
        tl.store(target, tl.trans(tile), mask=k_inside[:, None] & n_inside[None, :])
    # last, since the loads of the tile would wait for an earlier store
    tl.store(out_scale_ptr + (matrix * blocks_k + block_k) * out_scale_ld + block_n, scale)


@triton.jit(do_not_specialize=["rows", "blocks_k"])
def dequantize_kernel(
    data_ptr, scale_ptr, out_ptr, rows, cols, data_stride_e, data_stride_m, scale_stride_e,
    scale_stride_m, scale_stride_k, blocks_m, blocks_k, TILE_M: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    block_k = block % blocks_k
    block_m = block // blocks_k % blocks_m
    matrix = (block // (blocks_k * blocks_m)).to(tl.int64)
    m = block_m.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    k = block_k.to(tl.int64) * 128 + tl.arange(0, 128)
    inside = (m < rows)[:, None] & (k < cols)[None, :]
    data = tl.load(
        data_ptr + matrix * data_stride_e + m[:, None] * data_stride_m + k[None, :],
        mask=inside,
        other=0.0,
    )
    scale = tl.load(
        scale_ptr
        + matrix * scale_stride_e
        + m // ROWS_PER_SCALE * scale_stride_m
        + block_k.to(tl.int64) * scale_stride_k,
        mask=m < rows,
        other=0.0,
    )
    # comparisons with NaN are false, so that NaN stays
    value = data.to(tl.float32) * scale[:, None]
    limit = tl.where(tl.abs(scale) == float("inf"), float("inf"), LIMIT)[:, None]
    value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
    tl.store(
        out_ptr + (matrix * rows + m[:, None]) * cols + k[None, :],
        value.to(out_ptr.dtype.element_ty),
        mask=inside,
    )


def plan_transpose(x: Quantized, out: Quantized) -> Launch:
    """Plan the launch that transposes ``x`` ``[..., N, K]`` and its scales into ``out``."""
    data, scale, _ = x
    n, k = data.shape[-2:]
    stacked = data.ndim == 3
    as_bytes = data.view(torch.int8)
    return Launch(
        transpose_128x128_kernel,
        ((data.shape[0] if stacked else 1) * num_blocks(n) * num_blocks(k),),
        (as_bytes, scale, out.data.view(torch.int8), out.scale, n, k,
         data.stride(0) if stacked else 0, data.stride(-2), data.stride(-1),
         scale.stride(0) if stacked else 0, num_blocks(n), num_blocks(k),
         scale.stride(-2), out.scale.stride(-2)),
        {"EVEN": n % BLOCK == 0 and k % BLOCK == 0, "WIDE": n >= 2**24},
        {"num_warps": 8, "enable_fp_fusion": True},
    )  # fmt: skip


def plan_dequantize(x: Quantized, out: Tensor) -> Launch:
    """Plan the launch that writes ``data * scale`` into ``out``."""
    data, scale, format = x
    m, k = data.shape[-2:]
    stacked = data.ndim == 3
    tile_m = 32
    return Launch(
        dequantize_kernel,
        ((data.shape[0] if stacked else 1) * ceil_div(m, tile_m) * num_blocks(k),),
        (data, scale, out, m, k, data.stride(0) if stacked else 0, data.stride(-2),
         scale.stride(0) if stacked else 0, scale.stride(-2), scale.stride(-1),
         ceil_div(m, tile_m), num_blocks(k)),
        {"TILE_M": tile_m, "ROWS_PER_SCALE": format.rows, "LIMIT": largest_fp32(out.dtype)},
        {"num_warps": 4, "enable_fp_fusion": True},
    )  # fmt: skip


def transpose(x: Quantized) -> Quantized:
    """See :func:`blocktensor.ops.reference.transpose`."""
    if x.scale.stride(-1) != 1:
        x = x._replace(scale=x.scale.contiguous())
    out = empty_quantized(x.data.mT.shape, x.format, x.data.device)
    plan_transpose(x, out)()
    return out


def dequantize(x: Quantized, dtype: torch.dtype) -> Tensor:
    """See :func:`blocktensor.ops.reference.dequantize`."""
    out = torch.empty(x.data.shape, dtype=dtype, device=x.data.device)
    rows = x if x.data.stride(-1) == 1 else x._replace(data=x.data.contiguous())
    plan_dequantize(rows, out)()
    return out
