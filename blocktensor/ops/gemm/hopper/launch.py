"""Launch the Hopper GEMM: operands as tensor maps, the tile for a shape, the grid.

Also launch the sum over splits of K, if several programs share a tile.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...devices import card
from ...formats import BLOCK, Quantized, ceil_div, num_blocks, padded_rows
from ...runtime.launch import Launch, Rows
from ...runtime.triton_compat import compiler
from ...scale_layouts import VECTOR_BYTES, in_vectors, tma_scale
from .epilogue import CHUNK, Output
from .kernel import gemm_kernel
from .tile import WARPGROUP_ROWS, Tile
from .tiles import choose_tile, programs_for

_SUM_COLUMNS = 512

_OUT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@functools.cache
def _shared(rows: int, cols: int, dtype: gl.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, cols], dtype)


_VECTOR = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def data_map(data: Tensor, rows: int, height: int | None = None) -> TensorDescriptor:
    """Return the map of a matrix for copies of ``rows`` rows by one k block.

    ``height``: the number of its rows, as :class:`Rows` if it may differ.
    """
    layout = _shared(rows, BLOCK, gl.float8e4nv)
    shape = [data.shape[0] if height is None else height, data.shape[1]]
    return TensorDescriptor(data, shape, [data.shape[1], 1], [rows, BLOCK], layout)


def scale_map(scale: Tensor, count: int, ld: int, minor: int, major: int) -> TensorDescriptor:
    """Return the map of ``major`` lines of ``minor`` scales, as one vector, to copy ``count`` each.

    A tile at the edge also reads scales for rows that it does not store.
    """
    before = (major - 1) * ld
    size = minor.plus(before) if type(minor) is Rows else before + minor
    return TensorDescriptor(scale, [size], [1], [count], _VECTOR)


def scales_of(x: Quantized, count: int, height: int | None = None) -> tuple[TensorDescriptor, int]:
    """Return the map of a matrix's scales, to copy ``count`` each, and the stride of its lines.

    A line is a column of 1x128 scales and a row of 128x128 scales, as ``tma_scale`` lays them out.
    ``height``: the number of rows of 1x128 scales, as :class:`Rows` if it may differ.
    """
    by_columns = x.format.rows == 1
    ld = x.scale.stride(1 if by_columns else 0)
    minor, major = x.scale.shape if by_columns else x.scale.shape[::-1]
    if by_columns and height is not None:
        minor = height
    return scale_map(x.scale, count, ld, minor, major), ld


def output_map(out: Tensor, rows: int | None = None) -> TensorDescriptor:
    """Return the map of an output matrix, or of its first ``rows``, to store output buffers."""
    box = [WARPGROUP_ROWS, CHUNK.value]
    layout = _shared(*box, _OUT[out.dtype])
    shape = [out.shape[0] if rows is None else rows, out.shape[1]]
    return TensorDescriptor(out, shape, [out.stride(0), 1], box, layout)


def fits_tma(out: Tensor) -> bool:
    """Return True if TMA can address the rows of ``out``, in multiples of 16 bytes."""
    pitch = out.stride(0) * out.element_size()
    return pitch % VECTOR_BYTES == 0 and out.data_ptr() % VECTOR_BYTES == 0


def plan_gemm(
    a: Quantized,
    b: Quantized,
    bias: Tensor | None,
    out: Tensor,
    tile: Tile,
    splits: int = 1,
) -> Launch:
    """Plan the launch of ``out = A B^T (+ bias)``.

    Data is laid out by ``in_vectors``, scales by ``tma_scale``. ``out`` has contiguous rows. With
    several ``splits`` of K, a divisor of its number of blocks, their fp32 sums go to ``out`` one
    below the other, padded to whole tiles.
    """
    rows, cols = Rows(out.shape[0]), out.shape[1]
    (m, k), n = a.data.shape, b.data.shape[0]
    blocks = num_blocks(k)
    tma = fits_tma(out)
    a_scale_map, a_scale_ld = scales_of(a, tile.a_scales, Rows(m))
    b_scale_map, b_scale_ld = scales_of(b, tile.b_scales)
    tiles_m, tiles_n = ceil_div(m, tile.m), ceil_div(n, tile.n)
    output = Output(tma, bias is not None, splits > 1)
    items = tiles_m * tiles_n * splits
    programs = programs_for(tile, items, blocks // splits, card(out.device))
    return Launch(
        gemm_kernel,
        (programs,),
        (data_map(a.data, tile.a_rows, Rows(m)), a_scale_map, data_map(b.data, tile.n), b_scale_map,
         output_map(out, rows) if tma else out, out, out if bias is None else bias, rows, cols,
         tiles_m, tiles_n, blocks // splits, splits, a_scale_ld, b_scale_ld, out.stride(0)),
        {"OUT": output, "T": tile},
        tile.options,
        compiler.hopper_gemm,
        (out,),
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def sum_kernel(
    splits_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    split_stride,
    out_stride,
    blocks_n,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    # One program sums COLUMNS columns of one row, always in the same order.
    row = (tl.program_id(0) // blocks_n).to(tl.int64)
    cols = tl.program_id(0) % blocks_n * COLUMNS + tl.arange(0, COLUMNS)
    inside = (cols < N) & (row < M)
    source = splits_ptr + row * N + cols
    total = tl.load(source, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(source + split * split_stride, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    target = out_ptr + row * out_stride + cols
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)


def plan_sum(splits: Tensor, bias: Tensor | None, out: Tensor) -> Launch:
    """Plan ``out[M, N] = sum over p of splits[p, :M] (+ bias)``; ``splits`` is fp32."""
    m, n = out.shape
    blocks_n = ceil_div(n, _SUM_COLUMNS)
    return Launch(
        sum_kernel,
        (padded_rows(m) * blocks_n,),
        (splits, out if bias is None else bias, out, Rows(m), n, splits.stride(0), out.stride(0),
         blocks_n),
        {"SPLITS": splits.shape[0], "COLUMNS": _SUM_COLUMNS, "HAS_BIAS": bias is not None},
        {"num_warps": 4, "enable_fp_fusion": True},
        sized=(out,),
    )  # fmt: skip


def for_tma(x: Quantized) -> Quantized:
    """Return a cast in the layouts that TMA reads, copied where needed."""
    return Quantized(in_vectors(x.data), tma_scale(x), x.format)


def gemm(
    a: Quantized,
    b: Quantized,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> Tensor:
    """See :func:`blocktensor.ops.reference.gemm`; uses the tile with the fastest prediction."""
    (m, k), n = a.data.shape, b.data.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=a.data.device)
    plain = bias is None or fits_tma(out)
    tile, splits, _ = choose_tile(
        m, n, num_blocks(k), b.format.rows, card(out.device), plain, not batch_invariant
    )
    a, b = for_tma(a), for_tma(b)
    if splits == 1:
        plan_gemm(a, b, bias, out, tile)()
        return out
    rows = ceil_div(m, tile.m) * tile.m
    sums = torch.empty((splits * rows, n), dtype=torch.float32, device=out.device)
    plan_gemm(a, b, None, sums, tile, splits)()
    plan_sum(sums.view(splits, rows, n), bias, out)()
    return out
