"""Casts of what is computed from several tensors, by programs that copy the next tile in meanwhile.

The kernel of ``gluon_columnwise.py`` waits for the memory, then computes. That suits casts of few
instructions. SwiGLU's gradients take 60 an element, and its programs left the memory idle a third
of the time. Here a program casts one tile after another; their sources come through shared memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..devices import sms
from ..formats import BLOCK, Quantized, ceil_div, num_blocks
from ..runtime.launch import Launch
from ..runtime.triton_compat.compiler import default_allocation
from ..runtime.triton_compat.gluon import async_load, barrier
from ..scale_layouts import VECTOR_BYTES
from .gluon_tile import cast_tile
from .gluon_words import patch_layouts
from .numerics import method_for
from .producer import Producer

_WORDS = 64  # of a row of a tile: two elements each
_PROGRAMS = 2  # of an SM at a time, with 96 KiB of sources and half of the registers each
_TILES = 2
"""The most tiles of a program: later programs take turns, as those of long GEMMs do (see
``PROGRAM_US`` in gemm/hopper/tiles.py). Else the programs of an SM that a collective holds would do
all of their tiles after the others: 1.5 times as long, with two tiles each 1.2 times."""
_PATCH_ROWS = 8
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": True, "maxnreg": 128}


@gluon.jit
def _copy_in(
    tile, tiles, blocks_k, maps, buffers, arrived, FIRST: gl.constexpr, END: gl.constexpr
):  # fmt: skip
    # Begins to copy a tile of sources FIRST to END; of words beyond it, zeros.
    exists = tile < tiles
    row = tile // blocks_k * 128
    word = tile % blocks_k * buffers[0].shape[1]
    if FIRST == 0:
        mbarrier.expect(arrived, 3 * 128 * buffers[0].shape[1] * 4, pred=exists)
    for i in gl.static_range(FIRST, END):
        async_load(maps[i], [row, word], arrived, buffers[i], pred=exists)


@gluon.jit(
    do_not_specialize=[
        "rows", "cols", "row_scale_ld", "col_scale_ld", "third_scale_ld", "blocks_k", "tiles",
        "tokens",
    ]
)  # fmt: skip
def cast_ahead_kernel(
    x_map, y_map, z_map, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, row_ptr_1, row_scale_ptr_1,
    col_ptr_1, col_scale_ptr_1, col_ptr_2, col_scale_ptr_2, rows, cols, row_scale_ld, col_scale_ld,
    third_scale_ld, blocks_k, tiles, tokens,
    DTYPE: gl.constexpr, SQUARE: gl.constexpr, POWER_OF_TWO: gl.constexpr, METHOD: gl.constexpr,
    UNIT_M: gl.constexpr, UNIT_K: gl.constexpr, WORDS: gl.constexpr, PATCH_ROWS: gl.constexpr,
    COMPUTE: gl.constexpr, DETAIL: gl.constexpr, WIDTHS: gl.constexpr, THIRD: gl.constexpr,
    THIRD_SQUARE: gl.constexpr,
):  # fmt: skip
    # As cast_columnwise_kernel with both forms of two parts, computed from three sources; with
    # THIRD, the columnwise form of a third part too.
    BY_ROW: gl.constexpr = patch_layouts(DTYPE, PATCH_ROWS, 32 // PATCH_ROWS, gl.num_warps())[0]
    rows = rows * UNIT_M
    words = cols * UNIT_K
    maps = (x_map, y_map, z_map)
    x_s = gl.allocate_shared_memory(gl.int32, [128, WORDS], x_map.layout)
    y_s = gl.allocate_shared_memory(gl.int32, [128, WORDS], x_map.layout)
    z_s = gl.allocate_shared_memory(gl.int32, [128, WORDS], x_map.layout)
    buffers = (x_s, y_s, z_s)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    phase = 0
    AT_ONCE: gl.constexpr = 2 if THIRD else 3
    _copy_in(gl.program_id(0), tiles, blocks_k, maps, buffers, arrived, 0, 3)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile_m = tile // blocks_k
        tile_k = tile % blocks_k
        first_m = tile_m.to(gl.int64) * 128
        rows_left = tokens - tile_m * 128
        col_left = rows - tile_m * 128
        words_left = words - tile_k * WORDS
        mbarrier.wait(arrived, phase)
        phase ^= 1
        x = x_s.load(BY_ROW)
        y = y_s.load(BY_ROW)
        z = z_s.load(BY_ROW)
        if THIRD:  # there are no registers for three: it waits in the place of z
            # (no barrier: a thread writes over what it has read itself)
            z_s.store(COMPUTE(x, y, z, 2, DETAIL, DTYPE))
        second = COMPUTE(x, y, z, 1, DETAIL, DTYPE)
        x = COMPUTE(x, y, z, 0, DETAIL, DTYPE)
        barrier()  # all threads have read the buffers
        next_tile = tile + gl.num_programs(0)
        _copy_in(next_tile, tiles, blocks_k, maps, buffers, arrived, 0, AT_ONCE)
        cast_tile(
            x, row_ptr, row_scale_ptr, row_scale_ld, col_ptr, col_scale_ptr, col_scale_ld, first_m,
            tile_m, tile_k, rows, words, rows_left, col_left, words_left, DTYPE, True, SQUARE,
            POWER_OF_TWO, METHOD, 0, PATCH_ROWS, WIDTHS,
        )  # fmt: skip
        cast_tile(
            second, row_ptr_1, row_scale_ptr_1, row_scale_ld, col_ptr_1, col_scale_ptr_1,
            col_scale_ld, first_m, tile_m, tile_k, rows, words, rows_left, col_left, words_left,
            DTYPE, True, SQUARE, POWER_OF_TWO, METHOD, 0, PATCH_ROWS, WIDTHS,
        )  # fmt: skip
        if THIRD:
            third = z_s.load(BY_ROW)
            fence_async_shared()  # what threads have written comes before the next copy
            barrier()
            _copy_in(next_tile, tiles, blocks_k, maps, buffers, arrived, 2, 3)
            cast_tile(
                third, col_ptr_2, col_scale_ptr_2, third_scale_ld, col_ptr_2, col_scale_ptr_2,
                third_scale_ld, first_m, tile_m, tile_k, rows, words, rows_left, col_left,
                words_left, DTYPE, False, THIRD_SQUARE, POWER_OF_TWO, METHOD, 0, PATCH_ROWS, 1,
            )  # fmt: skip


def takes(x: Tensor, col: Quantized, producer: Producer, offs: Tensor | None) -> bool:
    """Return whether the kernel casts what ``producer`` makes of ``x``: parts of three tensors.

    Two parts in square blocks with power-of-two scales spill, and are faster tile by tile.
    """
    sources = (x, *producer.more)
    return (
        producer.second is not None
        and len(sources) == 3
        and offs is None
        and x.numel() > 0
        and not (col.format.transposes and col.format.power_of_two)
        and x.dtype == torch.bfloat16
        and all(
            y.data_ptr() % VECTOR_BYTES == 0 and y.stride(0) % 8 == y.shape[1] % 8 == 0
            for y in sources
        )
    )


def _map(x: Tensor) -> TensorDescriptor:
    words = x.view(torch.int32)
    box = [BLOCK, _WORDS]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.int32)
    return TensorDescriptor(words, list(words.shape), [words.stride(0), 1], box, layout)


def plan_ahead(x: Tensor, row: Quantized, col: Quantized, producer: Producer) -> Launch:
    """Plan the launch that casts what ``producer`` makes of ``x[M, K]`` into ``row`` and ``col``, a
    second part into ``producer.second``, and any third into ``producer.third``; see :func:`takes`.
    """
    k, m = col.data.shape
    second_row, second_col = producer.second or (None, None)
    assert second_row is not None
    assert second_col is not None
    third = producer.third
    blocks_k, unit = num_blocks(k), VECTOR_BYTES // x.element_size()
    tiles = num_blocks(x.shape[0]) * blocks_k
    programs = max(min(tiles, _PROGRAMS * sms(x.device)), ceil_div(tiles, _TILES))
    return Launch(
        cast_ahead_kernel,
        (programs,),
        (*map(_map, (x, *producer.more)), *row[:2], *col[:2], *second_row[:2], *second_col[:2],
         *(third or col)[:2], m // VECTOR_BYTES, k // unit, row.scale.stride(1), _scale_ld(col),
         _scale_ld(third or col), blocks_k, tiles, x.shape[0]),
        {
            "DTYPE": gl.bfloat16,
            "SQUARE": col.format.transposes,
            "POWER_OF_TWO": col.format.power_of_two,
            "METHOD": method_for(torch.bfloat16),
            "UNIT_M": VECTOR_BYTES,
            "UNIT_K": 4,
            "WORDS": _WORDS,
            "PATCH_ROWS": _PATCH_ROWS,
            "COMPUTE": producer.compute,
            "DETAIL": producer.detail,
            "WIDTHS": producer.widths,
            "THIRD": third is not None,
            "THIRD_SQUARE": third is not None and third.format.transposes,
        },
        _OPTIONS | default_allocation(),
    )  # fmt: skip


def _scale_ld(col: Quantized) -> int:
    return col.scale.stride(0 if col.format.transposes else 1)
