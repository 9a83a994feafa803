"""The portable grouped GEMMs (sm_89 and later): one tile of one expert per program.

Grids have as many programs as groups can have tiles at most; surplus programs end at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cast.groups import padded_groups, rows_of_block
from ..formats import BLOCK, Quantized, group_blocks, num_blocks
from ..runtime.launch import Launch, Rows
from ..scale_layouts import in_vectors
from .low_rank import padded_rank


@triton.jit
def _contract(
    a_ptrs,
    a_scale_ptrs,
    b_ptrs,
    b_scale_ptrs,
    a_scale_stride_k,
    b_scale_stride_k,
    blocks,
    K,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    # The fp32 sum over `blocks` k blocks, of K columns in all; each is scaled before it is added.
    k = tl.arange(0, 128)
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for block in range(blocks):
        left = K - block * 128
        a = tl.load(a_ptrs, mask=(k < left)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(k < left)[:, None], other=0.0)
        acc += tl.dot(a, b) * tl.load(a_scale_ptrs)[:, None] * tl.load(b_scale_ptrs)[None, :]
        a_ptrs += 128
        b_ptrs += 128
        a_scale_ptrs += a_scale_stride_k
        b_scale_ptrs += b_scale_stride_k
    return acc


@triton.jit(do_not_specialize=["tokens", "groups", "blocks_k", "tiles_n"])
def grouped_gemm_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, left_ptr, right_ptr, bias_ptr, out_ptr, offs_ptr,
    tokens, N, K, groups, a_scale_stride_m, a_scale_stride_k, b_stride_e, b_scale_stride_e,
    b_scale_stride_n, b_scale_stride_k, blocks_k, tiles_n, rank, GROUPS: tl.constexpr,
    TILE_N: tl.constexpr, HAS_BIAS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    # A tile has the rows of one block: 128 of one group, or of none, which are zeros.
    tile_n = tl.program_id(0) % tiles_n
    first, left, has_group, group = rows_of_block(
        tl.program_id(0) // tiles_n, offs_ptr, groups, tokens, GROUPS
    )
    if left <= 0:
        return
    first_n = tile_n * TILE_N
    k = tl.arange(0, 128)
    rows = tl.arange(0, 128)
    cols = tl.arange(0, TILE_N)
    am = (first + tl.minimum(rows, left - 1)).to(tl.int64)
    bn = tl.minimum(first_n + cols, N - 1).to(tl.int64)
    expert = group.to(tl.int64)
    acc = _contract(
        a_ptr + am[:, None] * K + k[None, :],
        a_scale_ptr + am * a_scale_stride_m,
        b_ptr + expert * b_stride_e + bn[None, :] * K + k[:, None],
        b_scale_ptr + expert * b_scale_stride_e + bn // 128 * b_scale_stride_n,
        a_scale_stride_k,
        b_scale_stride_k,
        tl.where(has_group, blocks_k, 0),
        K,
        128,
        TILE_N,
    )
    if RANK:
        r = tl.arange(0, RANK)
        is_left = ((rows < left) & has_group)[:, None] & (r < rank)[None, :]
        u = tl.load(left_ptr + am[:, None] * rank + r[None, :], mask=is_left, other=0.0)
        at = right_ptr + (expert * N + bn)[None, :] * rank + r[:, None]
        v = tl.load(at, mask=(r < rank)[:, None], other=0.0)
        acc += tl.where(has_group, tl.dot(u, v), 0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * N + bn).to(tl.float32)
        acc += tl.where(has_group, bias, 0.0)[None, :]
    place = (first + rows).to(tl.int64)[:, None] * N + (first_n + cols)[None, :]
    inside = (rows < left)[:, None] & (first_n + cols < N)[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "tiles_m", "tiles_n"])
def grouped_wgrad_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, out_ptr, offs_ptr, tokens, N, K, P, a_scale_stride_n,
    a_scale_stride_k, b_scale_stride_n, b_scale_stride_k, tiles_m, tiles_n, A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # The blocks of a group follow the blocks of all earlier groups.
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    first = 0
    begin = 0
    end = tl.maximum(tl.minimum(tl.load(offs_ptr), tokens), 0)
    for e in range(expert):
        first += (end - begin + 127) // 128
        begin = end
        end = tl.maximum(tl.minimum(tl.load(offs_ptr + e + 1), tokens), begin)
    blocks = (end - begin + 127) // 128
    k = tl.arange(0, 128)
    rows = tile // tiles_n * TILE + tl.arange(0, TILE)
    cols = tile % tiles_n * TILE + tl.arange(0, TILE)
    am = tl.minimum(rows, N - 1).to(tl.int64)
    bn = tl.minimum(cols, K - 1).to(tl.int64)
    at = tl.cast(first, tl.int64)
    acc = _contract(
        a_ptr + am[:, None] * P + at * 128 + k[None, :],
        a_scale_ptr + am // A_ROWS * a_scale_stride_n + at * a_scale_stride_k,
        b_ptr + bn[None, :] * P + at * 128 + k[:, None],
        b_scale_ptr + bn // B_ROWS * b_scale_stride_n + at * b_scale_stride_k,
        a_scale_stride_k,
        b_scale_stride_k,
        blocks,
        blocks * 128,
        TILE,
        TILE,
    )
    place = out_ptr + (tl.cast(expert, tl.int64) * N + rows)[:, None] * K + cols[None, :]
    inside = (rows < N)[:, None] & (cols < K)[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=inside)


_TILE = BLOCK
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": True, "num_stages": 3}


def plan_grouped_gemm(
    a: Quantized,
    b: Quantized,
    offs: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Launch:
    """Plan the launch of ``out[T, N] = A[T, K] B[e, N, K]^T (+ bias[e])`` for the rows of group e.

    ``left[T, R] right[e, N, R]^T`` is added if given. Rows of data must be multiples of 16 bytes.
    """
    (rows_of_a, k), (experts, n, _) = a.data.shape, b.data.shape
    tiles_n = num_blocks(n)
    rows, cols = b.format.block_shape
    assert cols == BLOCK
    assert rows == BLOCK
    rank = 0 if left is None else left.shape[1]
    return Launch(
        grouped_gemm_kernel,
        (group_blocks(rows_of_a, 0 if offs is None else experts + 1) * tiles_n,),
        (a.data, a.scale, b.data, b.scale, out if left is None else left,
         out if right is None else right, out if bias is None else bias, out,
         out if offs is None else offs, Rows(len(out)),
         n, k, experts, *a.scale.stride(), b.data.stride(0), *b.scale.stride(), num_blocks(k),
         tiles_n, rank),
        {"GROUPS": 0 if offs is None else padded_groups(experts), "TILE_N": _TILE,
         "HAS_BIAS": bias is not None, "RANK": padded_rank(rank) if rank else 0},
        _OPTIONS,
        sized=(out,),
    )  # fmt: skip


def plan_grouped_wgrad(
    a: Quantized, b: Quantized, offs: Tensor, tokens: int, out: Tensor
) -> Launch:
    """Plan the launch of ``out[e, N, K] = A[N, P] B[K, P]^T`` over the columns of group e."""
    experts, n, k = out.shape
    tiles_m, tiles_n = num_blocks(n), num_blocks(k)
    return Launch(
        grouped_wgrad_kernel,
        (experts * tiles_m * tiles_n,),
        (a.data, a.scale, b.data, b.scale, out, offs, Rows(tokens), n, k, a.data.shape[1],
         *a.scale.stride(), *b.scale.stride(), tiles_m, tiles_n),
        {"A_ROWS": a.format.rows, "B_ROWS": b.format.rows, "TILE": _TILE},
        _OPTIONS,
    )  # fmt: skip


def grouped_gemm(
    a: Quantized,
    b: Quantized,
    offs: Tensor | None,
    bias: Any,
    out_dtype: torch.dtype,
    tokens: Any = None,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Tensor:
    """See :func:`blocktensor.ops.reference.grouped_gemm`."""
    shape = a.data.shape[0] if tokens is None else tokens, b.data.shape[1]
    out = torch.empty(shape, dtype=out_dtype, device=a.data.device)
    stack = in_vectors(b.data.flatten(0, 1)).unflatten(0, b.data.shape[:2])
    a, b = a._replace(data=in_vectors(a.data)), b._replace(data=stack)
    bias = None if bias is None else bias.contiguous()
    plan_grouped_gemm(a, b, offs, bias, out, left, right)()
    return out


def grouped_gemm_wgrad(
    a: Quantized, b: Quantized, offs: Tensor, tokens: int, out_dtype: torch.dtype
) -> Tensor:
    """See :func:`blocktensor.ops.reference.grouped_gemm_wgrad`."""
    shape = offs.shape[0], a.data.shape[0], b.data.shape[0]
    out = torch.empty(shape, dtype=out_dtype, device=a.data.device)
    plan_grouped_wgrad(a, b, offs, tokens, out)()
    return out
