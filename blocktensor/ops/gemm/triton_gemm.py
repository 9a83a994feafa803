"""The portable GEMM (sm_89 and later): both scale kinds on either operand, any shape.

One tile per program; ``tl.dot`` covers exactly 128 of K, then the partial product is promoted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import BLOCK, Quantized, ceil_div, num_blocks
from ..runtime.launch import Launch, Rows
from ..scale_layouts import in_vectors


@triton.jit(do_not_specialize=["M", "blocks_k", "tiles_m", "tiles_n"])
def gemm_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, bias_ptr, out_ptr, M, N, K, a_scale_stride_m,
    a_scale_stride_k, b_scale_stride_n, b_scale_stride_k, out_stride, blocks_k, tiles_m, tiles_n,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    # L2 order: GROUP m tiles share a sweep over n.
    tile = tl.program_id(0)
    group = tile // (GROUP * tiles_n)
    first = group * GROUP
    size = tl.minimum(GROUP, tiles_m - first)
    within = tile - group * GROUP * tiles_n
    first_m = (first + within % size) * TILE_M
    first_n = (within // size) * TILE_N
    k = tl.arange(0, 128)
    # Rows beyond the edge read row M-1 or N-1 instead: their results are never stored.
    am = tl.minimum(first_m + tl.arange(0, TILE_M), M - 1).to(tl.int64)
    bn = tl.minimum(first_n + tl.arange(0, TILE_N), N - 1).to(tl.int64)
    a_ptrs = a_ptr + am[:, None] * K + k[None, :]
    b_ptrs = b_ptr + bn[None, :] * K + k[:, None]
    a_scale_ptrs = a_scale_ptr + am // A_ROWS * a_scale_stride_m
    b_scale_ptrs = b_scale_ptr + bn // B_ROWS * b_scale_stride_n

    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for block in range(blocks_k):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            left = K - block * 128
            a = tl.load(a_ptrs, mask=k[None, :] < left, other=0.0)
            b = tl.load(b_ptrs, mask=k[:, None] < left, other=0.0)
        a_scale = tl.load(a_scale_ptrs)
        b_scale = tl.load(b_scale_ptrs)
        acc += tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]
        a_ptrs += 128
        b_ptrs += 128
        a_scale_ptrs += a_scale_stride_k
        b_scale_ptrs += b_scale_stride_k

    if HAS_BIAS:
        acc += tl.load(bias_ptr + bn).to(tl.float32)[None, :]
    rows = tl.arange(0, TILE_M)
    cols = tl.arange(0, TILE_N)
    corner = out_ptr + first_m.to(tl.int64) * out_stride + first_n
    out_ptrs = corner + (rows.to(tl.int64)[:, None] * out_stride + cols[None, :])
    inside = (rows < M - first_m)[:, None] & (cols < N - first_n)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


def plan_gemm(a: Quantized, b: Quantized, bias: Tensor | None, out: Tensor) -> Launch:
    """Plan the launch of ``out = A B^T (+ bias)``; small M gets a smaller tile.

    Rows of data must be multiples of 16 bytes (``scale_layouts.in_vectors``): byte loads would take
    more registers than are available.
    """
    (m, k), n = a.data.shape, b.data.shape[0]
    tile_m = 64 if m <= 64 else 128
    tiles_m, tiles_n = ceil_div(m, tile_m), ceil_div(n, BLOCK)
    return Launch(
        gemm_kernel,
        (tiles_m * tiles_n,),
        (a.data, a.scale, b.data, b.scale, out if bias is None else bias, out, Rows(m), n, k,
         *a.scale.stride(), *b.scale.stride(), out.stride(0), num_blocks(k), tiles_m, tiles_n),
        {
            "A_ROWS": a.format.rows,
            "B_ROWS": b.format.rows,
            "TILE_M": tile_m,
            "TILE_N": BLOCK,
            "GROUP": 8,
            "EVEN_K": k % BLOCK == 0,
            "HAS_BIAS": bias is not None,
        },
        {"num_warps": 8 if tile_m == BLOCK else 4, "enable_fp_fusion": True, "num_stages": 4},
        sized=(out,),
    )  # fmt: skip


def _dense(x: Quantized) -> Quantized:
    return x._replace(data=in_vectors(x.data))


def gemm(
    a: Quantized,
    b: Quantized,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> Tensor:
    """See :func:`blocktensor.ops.reference.gemm`."""
    shape = a.data.shape[0], b.data.shape[0]
    out = torch.empty(shape, dtype=out_dtype, device=a.data.device)
    plan_gemm(_dense(a), _dense(b), bias, out)()
    return out
