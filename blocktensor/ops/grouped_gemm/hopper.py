"""The grouped Hopper GEMM's launchers: operands as tensor maps, the tile for a shape, the grid."""

from __future__ import annotations

import torch
from torch import Tensor

from ..devices import sms
from ..formats import BLOCK, Quantized, ceil_div, num_blocks
from ..gemm.hopper import assembly
from ..gemm.hopper.epilogue import Output
from ..gemm.hopper.launch import add_mode, data_map, fits_tma, output_map, scale_map
from ..gemm.hopper.tile import Tile
from ..gemm.hopper.tiles import programs_for
from ..runtime.launch import Launch
from ..scale_layouts import in_vectors, pad4, tma_scale
from .hopper_kernel import grouped_kernel
from .tiles import choose_grouped_tile

def plan_grouped_gemm(
    a: Quantized, b: Quantized, offs: Tensor, bias: Tensor | None, out: Tensor, tile: Tile
) -> Launch:
    """The launch of ``out[T, N] = A[T, K] B[e, N, K]^T (+ bias[e])`` for rows of group e."""
    (tokens, k), (experts, n, _) = a.data.shape, b.data.shape
    blocks_n = num_blocks(n)
    a_scale_ld, b_scale_ld = a.scale.stride(1), b.scale.stride(1)
    tiles = ceil_div(tokens, tile.m) + experts // 2, ceil_div(n, tile.n)
    output = Output(fits_tma(out), bias is not None, clip=True)
    assembly.install()  # before each compilation: another library may have replaced the hook
    return Launch(
        grouped_kernel,
        (programs_for(tile, tiles[0] * tiles[1], num_blocks(k), sms(out.device)),),
        (data_map(a.data, tile.a_rows),
         scale_map(a.scale, tile.a_scales, a_scale_ld, tokens, num_blocks(k)),
         data_map(b.data.flatten(0, 1), tile.b_rows),
         scale_map(b.scale, tile.b_scales, b_scale_ld, num_blocks(k), experts * blocks_n),
         output_map(out, tile) if output.tma else out, out, out if bias is None else bias, offs,
         tokens, n, n, experts, 0, tiles[1], num_blocks(k), blocks_n, a_scale_ld,
         b_scale_ld, out.stride(0)),
        {"OUT": output, "T": tile},
        tile.options,
    )  # fmt: skip


def plan_grouped_wgrad(
    a: Quantized, b: Quantized, offs: Tensor, tokens: int, out: Tensor, accumulate: bool, tile: Tile
) -> Launch:
    """The launch of ``out[e, N, K] (+)= A[N, P] B[K, P]^T`` over the columns of group e."""
    experts, n, k = out.shape
    blocks = a.data.shape[1] // BLOCK
    a_scale_ld, b_scale_ld = a.scale.stride(1), b.scale.stride(1)
    rows = out.flatten(0, 1)
    tiles_m, tiles_n = ceil_div(n, tile.m), ceil_div(k, tile.n)
    tiles = tiles_m * tiles_n * experts
    depth = ceil_div(tokens, BLOCK * experts)  # k blocks of a group, about
    add = add_mode(tile, tiles, depth, out.device) if accumulate else None
    output = Output(fits_tma(rows), False, add, clip=True)
    assembly.install()
    return Launch(
        grouped_kernel,
        (programs_for(tile, tiles, depth, sms(out.device), accumulate),),
        (data_map(a.data, tile.a_rows), scale_map(a.scale, tile.a_scales, a_scale_ld, n, blocks),
         data_map(b.data, tile.b_rows), scale_map(b.scale, tile.b_scales, b_scale_ld, k, blocks),
         output_map(rows, tile) if output.tma else rows, rows, rows, offs, tokens, n, k, experts,
         tiles_m, tiles_n, blocks, 0, a_scale_ld, b_scale_ld, k),
        {"OUT": output, "T": tile},
        tile.options,
    )  # fmt: skip


def _for_tma(x: Quantized) -> Quantized:
    if x.data.ndim == 2:
        return Quantized(in_vectors(x.data), tma_scale(x), x.format)
    rows = in_vectors(x.data.flatten(0, 1))
    return Quantized(rows.unflatten(0, x.data.shape[:2]), _stack_scale(x.scale), x.format)


def _stack_scale(scale: Tensor) -> Tensor:
    """Scales of a stack as TMA reads them: one matrix of rows 16 bytes apart; a copy if needed."""
    experts, rows, cols = scale.shape
    ld = scale.stride(1)
    if scale.stride() == (rows * ld, ld, 1) and ld % 4 == 0 and scale.data_ptr() % 16 == 0:
        return scale
    made = torch.empty((experts, rows, pad4(cols)), dtype=scale.dtype, device=scale.device)
    return made[..., :cols].copy_(scale)


def grouped_gemm(
    a: Quantized, b: Quantized, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See :func:`blocktensor.ops.reference.grouped_gemm`."""
    (tokens, k), (experts, n, _) = a.data.shape, b.data.shape
    out = torch.empty((tokens, n), dtype=out_dtype, device=a.data.device)
    tile = choose_grouped_tile(tokens, n, num_blocks(k), experts, BLOCK, sms(out.device))
    bias = None if bias is None else bias.contiguous()
    plan_grouped_gemm(_for_tma(a), _for_tma(b), offs, bias, out, tile)()
    return out


def grouped_gemm_wgrad(
    a: Quantized, b: Quantized, offs: Tensor, tokens: int, out_dtype: torch.dtype
) -> Tensor:
    """See :func:`blocktensor.ops.reference.grouped_gemm_wgrad`."""
    shape = offs.shape[0], a.data.shape[0], b.data.shape[0]
    out = torch.empty(shape, dtype=out_dtype, device=a.data.device)
    _run_wgrad(out, a, b, offs, tokens, accumulate=False)
    return out


def grouped_gemm_wgrad_add_(
    out: Tensor, a: Quantized, b: Quantized, offs: Tensor, tokens: int
) -> None:
    """See :func:`blocktensor.ops.reference.grouped_gemm_wgrad_add_`."""
    if fits_tma(out.flatten(0, 1)):
        _run_wgrad(out, a, b, offs, tokens, accumulate=True)
    else:
        out.add_(grouped_gemm_wgrad(a, b, offs, tokens, out.dtype))


def _run_wgrad(
    out: Tensor, a: Quantized, b: Quantized, offs: Tensor, tokens: int, accumulate: bool
) -> None:
    experts, n, k = out.shape
    depth = ceil_div(tokens, BLOCK * experts)
    tile = choose_grouped_tile(n, k, depth, experts, 1, sms(out.device), accumulate)
    plan_grouped_wgrad(_for_tma(a), _for_tma(b), offs, tokens, out, accumulate, tile)()
