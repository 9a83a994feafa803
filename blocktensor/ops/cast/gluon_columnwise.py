"""Cast columnwise, or columnwise and rowwise from one read: one program for each tile."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..formats import BlockFormat, Quantized, num_blocks
from ..runtime.launch import Launch, Rows
from ..runtime.triton_compat.compiler import default_allocation
from ..scale_layouts import VECTOR_BYTES
from .gluon_tile import cast_tile
from .gluon_words import patch_layouts, per_word
from .groups import Casts, blocks_of, padded_groups, place
from .numerics import method_for
from .producer import NONE, Producer
from .triton_cast import plan_1x128


@gluon.jit
def _rows_of_block(block, offs_ptr, groups, tokens, GROUPS: gl.constexpr):
    # groups.rows_of_block, where each warp knows all groups
    EACH: gl.constexpr = gl.BlockedLayout([GROUPS // 32], [32], [gl.num_warps()], [0])
    group = gl.arange(0, GROUPS, layout=EACH)
    end = gl.load(offs_ptr + group, mask=group < groups, other=0)
    begin = gl.load(offs_ptr + group - 1, mask=(group > 0) & (group < groups), other=0)
    return place(block, group, begin, end, tokens)


@gluon.jit(
    do_not_specialize=[
        "rows",
        "cols",
        "stride_m",
        "row_scale_ld",
        "col_scale_ld",
        "blocks_k",
        "groups",
        "tokens",
        "col_blocks",
        "y_stride_m",
        "z_stride_m",
    ]
)
def cast_columnwise_kernel(
    x_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, rows, cols, stride_m, row_scale_ld,
    col_scale_ld, blocks_k, offs_ptr, groups, tokens, col_blocks, y_ptr, z_ptr,
    y_stride_m, z_stride_m, row_ptr_1, row_scale_ptr_1, col_ptr_1, col_scale_ptr_1,
    ROWWISE: gl.constexpr, SQUARE: gl.constexpr, POWER_OF_TWO: gl.constexpr, METHOD: gl.constexpr,
    UNIT_M: gl.constexpr, UNIT_K: gl.constexpr, GROUPS: gl.constexpr,
    PATCH_ROWS: gl.constexpr, COMPUTE: gl.constexpr, DETAIL: gl.constexpr, SOURCES: gl.constexpr,
    PARTS: gl.constexpr, WIDTHS: gl.constexpr,
):  # fmt: skip
    # One program casts a tile [128, 128], read once. Sizes and strides are in units of UNIT_M rows
    # or UNIT_K words, so that loads, stores and their masks are as wide as a unit. x has `tokens`
    # rows; the columnwise form has `rows` columns, those after the rows of x zeros. With GROUPS, a
    # block lies in one of `groups` groups and fills one of `col_blocks` whole blocks there. With
    # SQUARE, the tile is one block of the columnwise form; col_scale_ld is the distance of
    # neighbours along K then, else along M. With COMPUTE (producer.py), the tile is computed from
    # tiles of x, y and z, and the second of two PARTS has other outputs.
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    PER_WORD: gl.constexpr = per_word(DTYPE)
    WORDS: gl.constexpr = 128 // PER_WORD
    BY_ROW: gl.constexpr = patch_layouts(DTYPE, PATCH_ROWS, 32 // PATCH_ROWS, gl.num_warps())[0]
    rows = rows * UNIT_M
    words = cols * UNIT_K
    stride = stride_m * UNIT_K
    tile = gl.program_id(0)
    tile_m = tile // blocks_k
    tile_k = tile % blocks_k
    first_word = tile_k.to(gl.int64) * WORDS
    words_left = words - tile_k * WORDS
    if GROUPS:
        first_row, rows_left, has_group, _ = _rows_of_block(
            tile_m, offs_ptr, groups, tokens, GROUPS
        )
        first_m = first_row.to(gl.int64)
        col_left = gl.where(has_group & (tile_m < col_blocks), 128, 0)
        if not ROWWISE:
            if col_left == 0:
                return
        elif rows_left <= 0:
            return
    else:
        first_m = tile_m.to(gl.int64) * 128
        rows_left = tokens - tile_m * 128
        col_left = rows - tile_m * 128

    m = gl.arange(0, 128, layout=gl.SliceLayout(1, BY_ROW))[:, None]
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, BY_ROW))[None, :]
    inside = (m < rows_left) & (word < words_left)
    source = x_ptr.to(gl.pointer_type(gl.int32)) + first_word
    x = gl.load(source + first_m * stride + (m * stride + word), mask=inside, other=0)
    if COMPUTE is not None:
        y, z = x, x
        if SOURCES > 1:
            ld = y_stride_m * UNIT_K
            source = y_ptr.to(gl.pointer_type(gl.int32)) + first_m * ld + first_word
            y = gl.load(source + (m * ld + word), mask=inside, other=0)
        if SOURCES > 2:
            ld = z_stride_m * UNIT_K
            source = z_ptr.to(gl.pointer_type(gl.int32)) + first_m * ld + first_word
            z = gl.load(source + (m * ld + word), mask=inside, other=0)
        if PARTS == 2:
            second = COMPUTE(x, y, z, 1, DETAIL, DTYPE)
        x = COMPUTE(x, y, z, 0, DETAIL, DTYPE)

    cast_tile(
        x, row_ptr, row_scale_ptr, row_scale_ld, col_ptr, col_scale_ptr, col_scale_ld, first_m,
        tile_m, tile_k, rows, words, rows_left, col_left, words_left, DTYPE, ROWWISE, SQUARE,
        POWER_OF_TWO, METHOD, GROUPS, PATCH_ROWS, WIDTHS,
    )  # fmt: skip
    if PARTS == 2:
        cast_tile(
            second, row_ptr_1, row_scale_ptr_1, row_scale_ld, col_ptr_1, col_scale_ptr_1,
            col_scale_ld, first_m, tile_m, tile_k, rows, words, rows_left, col_left, words_left,
            DTYPE, ROWWISE, SQUARE, POWER_OF_TWO, METHOD, GROUPS, PATCH_ROWS, WIDTHS,
        )  # fmt: skip


def _threads(
    x: Tensor, unit_k: int, row: bool, col: BlockFormat, producer: Producer
) -> tuple[int, dict[str, int]]:
    # Rows of a thread's patch, and compiler options. Without a register limit, fewer programs fit
    # on an SM.
    per_word = 4 // x.element_size()
    if producer.compute is None:
        limit = {"maxnreg": 128} if row and unit_k > 1 else {}
        return 16, {"num_warps": 8 // per_word, "enable_fp_fusion": True, **limit}
    # A thread holds its patch of every source, and intermediate results: more warps share a tile
    # than in a plain cast. The limits are the fastest of docs/experiments/producers.md.
    from_three = len(producer.more) == 2
    few = x.dtype == torch.bfloat16 and not col.power_of_two
    if per_word == 2 and not from_three and unit_k > 1 and few:
        most = 64 if col.transposes else 72
        return 8, {"num_warps": 8, "enable_fp_fusion": True, "maxnreg": most}
    if from_three and few and unit_k > 1:
        rows, warps, most = (8, 8, 80) if producer.second is None else (4, 16, 64)
        return rows, {"num_warps": warps, "enable_fp_fusion": True, "maxnreg": most}
    # With 64 registers, two programs fit on an SM; one program where they would spill much.
    fits = per_word == 2 and (not from_three or (unit_k > 1 and not col.power_of_two))
    return 8 // per_word, {
        "num_warps": 16,
        "enable_fp_fusion": True,
        "maxnreg": 64 if fits else 128,
    }


def plan_columnwise(
    x: Tensor,
    row: Quantized | None,
    col: Quantized,
    offs: Tensor | None = None,
    producer: Producer = NONE,
) -> Launch:
    """Plan the launch that casts ``x[M, K]`` into ``col`` and, unless None, ``row``.

    With ``offs``, by groups. With ``producer``, cast what it computes from ``x``.
    """
    k, m = col.data.shape
    assert m % VECTOR_BYTES == 0
    row_data, row_scale, _ = row or col
    blocks_k = num_blocks(k)
    per_word = 4 // x.element_size()
    sources = (x, *producer.more)
    even = all((k | source.stride(0)) % (4 * per_word) == 0 for source in sources)
    unit_k = 4 if even else 1
    patch_rows, options = _threads(x, unit_k, row is not None, col.format, producer)
    groups = 0 if offs is None else offs.shape[0]
    square = col.format.transposes
    return Launch(
        cast_columnwise_kernel,
        (blocks_of(x, groups, row is not None) * blocks_k,),
        (x, row_data, row_scale, col.data, col.scale, m // VECTOR_BYTES, k // (per_word * unit_k),
         x.stride(0) // (per_word * unit_k), row_scale.stride(1),
         col.scale.stride(0 if square else 1), blocks_k,
         x if offs is None else offs, groups, Rows(len(x)), num_blocks(m),
         *producer.arguments(x, (row_data, row_scale, *col[:2]), per_word * unit_k)),
        {
            "ROWWISE": row is not None,
            "SQUARE": square,
            "POWER_OF_TWO": col.format.power_of_two,
            "METHOD": method_for(x.dtype),
            "UNIT_M": VECTOR_BYTES,
            "UNIT_K": unit_k,
            "GROUPS": padded_groups(groups),
            "PATCH_ROWS": patch_rows,
            **producer.constants(),
        },
        options | default_allocation(),
        sized=producer.sized(row) if offs is None else (),
    )  # fmt: skip


casts = Casts(plan_columnwise, plan_1x128)
