"""Launch the grouped Hopper GEMMs: operands as tensor maps, the tile for a shape, the grid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..devices import sms
from ..formats import Quantized, ceil_div, group_rows, num_blocks, padded_rows
from ..gemm.hopper.launch import data_map, fits_tma, output_map, scale_map, scales_of
from ..gemm.hopper.tile import Tile
from ..runtime.launch import Launch, Rows
from ..runtime.triton_compat import compiler
from ..scale_layouts import VECTOR_BYTES, in_vectors, stacked_scale, tma_scale
from .hopper_items import GroupedOutput
from .hopper_kernel import grouped_kernel
from .low_rank import padded_rank
from .tiles import choose_gemm_tile, choose_wgrad_tile


def plan_grouped_gemm(
    a: Quantized,
    b: Quantized,
    offs: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    tile: Tile,
    programs: int,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Launch:
    """Plan ``out[T, N] = A[T, K] B[e, N, K]^T (+ bias[e])`` for the rows of group e.

    ``left[T, R] right[e, N, R]^T`` is added if given. With ``offs`` the rows of A are padded to one
    of few numbers. The map of the output has as many rows as A, maybe more than T, but no row from
    T on is written.
    """
    (height, k), (experts, n, _) = a.data.shape, b.data.shape
    rows = Rows(height) if offs is None else height
    blocks_k, blocks_n = num_blocks(k), num_blocks(n)
    a_scale_map, a_scale_ld = scales_of(a, tile.a_scales, rows)
    b_scale_ld = b.scale.stride(1)
    rank, low_rank = 0, (out, out)
    if left is not None and right is not None:
        rank = padded_rank(left.shape[1])
        low_rank = (
            _low_rank_map(left, tile.a_rows, rank, Rows(len(left))),
            _low_rank_map(right.flatten(0, 1), tile.n, rank, experts * n),
        )
    output = GroupedOutput(
        fits_tma(out), bias is not None, clip=True, rank=rank, has_ends=offs is not None
    )
    return Launch(
        grouped_kernel,
        (programs,),
        (data_map(a.data, tile.a_rows, rows), a_scale_map,
         data_map(b.data.flatten(0, 1), tile.n),
         scale_map(b.scale, tile.b_scales, b_scale_ld, blocks_k, experts * blocks_n), *low_rank,
         output_map(out, rows) if output.tma else out, out, out if bias is None else bias,
         out if offs is None else offs,
         Rows(len(out)), n, n, experts, 0, ceil_div(n, tile.n), blocks_k, blocks_n, a_scale_ld,
         b_scale_ld, out.stride(0)),
        {"OUT": output, "T": tile},
        tile.options,
        compiler.hopper_gemm,
        (out,),
    )  # fmt: skip


def plan_grouped_wgrad(
    a: Quantized,
    b: Quantized,
    offs: Tensor,
    tokens: int,
    out: Tensor,
    tile: Tile,
    programs: int,
) -> Launch:
    """Plan the launch of ``out[e, N, K] = A[N, P] B[K, P]^T`` over the columns of group e."""
    experts, n, k = out.shape
    blocks = num_blocks(a.data.shape[1])
    a_scale_map, a_scale_ld = scales_of(a, tile.a_scales)
    b_scale_map, b_scale_ld = scales_of(b, tile.b_scales)
    rows = out.flatten(0, 1)
    clip = n % tile.m != 0
    output = GroupedOutput(fits_tma(rows), clip=clip, cuts_rows=False)
    return Launch(
        grouped_kernel,
        (programs,),
        (data_map(a.data, tile.a_rows), a_scale_map, data_map(b.data, tile.n), b_scale_map, rows,
         rows, output_map(rows) if output.tma else rows, rows, rows, offs, Rows(tokens), n, k,
         experts, ceil_div(n, tile.m), ceil_div(k, tile.n), blocks, 0, a_scale_ld, b_scale_ld, k),
        {"OUT": output, "T": tile},
        tile.options,
        compiler.hopper_gemm,
    )  # fmt: skip


def _low_rank_map(x: Tensor, rows: int, rank: int, height: int) -> TensorDescriptor:
    """Return the map of an operand of the low-rank product, ``[height, R]``, for copies of rows."""
    box = [rows, rank]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    return TensorDescriptor(x, [height, x.shape[1]], [x.shape[1], 1], box, layout)


def _aligned(x: Tensor) -> Tensor:
    return x if x.data_ptr() % VECTOR_BYTES == 0 else x.clone()


def _for_tma(x: Quantized) -> Quantized:
    if x.data.ndim == 2:
        return Quantized(in_vectors(x.data), tma_scale(x), x.format)
    rows = in_vectors(x.data.flatten(0, 1))
    return Quantized(rows.unflatten(0, x.data.shape[:2]), stacked_scale(x.scale), x.format)


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
    (rows, k), (experts, n, _) = a.data.shape, b.data.shape
    shape = rows if tokens is None else tokens, n
    out = torch.empty(shape, dtype=out_dtype, device=a.data.device)
    blocks = num_blocks(k) + (left is not None)
    plain = bias is None and (left is None or fits_tma(out))
    tile, programs = choose_gemm_tile(padded_rows(rows), n, blocks, experts, sms(out.device), plain)
    bias = None if bias is None else bias.contiguous()
    left, right = (None if t is None else _aligned(t) for t in (left, right))
    a, b = _for_tma(a), _for_tma(b)
    plan_grouped_gemm(a, b, offs, bias, out, tile, programs, left, right)()
    return out


def grouped_gemm_wgrad(
    a: Quantized, b: Quantized, offs: Tensor, tokens: int, out_dtype: torch.dtype
) -> Tensor:
    """See :func:`blocktensor.ops.reference.grouped_gemm_wgrad`."""
    experts, n, k = shape = offs.shape[0], a.data.shape[0], b.data.shape[0]
    out = torch.empty(shape, dtype=out_dtype, device=a.data.device)
    tile, programs = choose_wgrad_tile(
        n, k, group_rows(tokens), experts, b.format.rows, sms(out.device)
    )
    plan_grouped_wgrad(_for_tma(a), _for_tma(b), offs, tokens, out, tile, programs)()
    return out
