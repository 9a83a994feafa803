"""Columnwise casts, alone or with the rowwise cast of the same read, stored from registers.

Only block maxima and values derived from them pass between threads, through shared memory and two
barriers: each thread's maxima of its patch (gluon_words.py), then the scale of each block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..formats import BlockFormat, Quantized, num_blocks
from ..runtime.launch import Launch
from ..scale_layouts import VECTOR_BYTES
from .gluon_words import (
    bytes_by_column,
    bytes_by_row,
    fp32_bits,
    larger,
    larger_half,
    largest,
    magnitudes,
    of_words,
    patch_layouts,
    per_word,
    times,
)
from .groups import blocks_of, grouped_by, grouped_columnwise_by, padded_groups, place
from .numerics import TINY_BITS, divisor, method_for, scale_from_bits
from .producer import NONE, Producer
from .triton_cast import both_by, columnwise_by


@gluon.constexpr_function
def _staggered(count, dtype):
    # [count, 128], padded by 16 bytes a row: neighbours in a column lie in different banks
    columns = [[0, 1 << i] for i in range(7)]
    rows = [[1 << i, 0] for i in range(count.bit_length() - 1)]
    return gl.PaddedSharedLayout([[128, 4 * per_word(dtype)]], columns + rows, [], [count, 128])


@gluon.jit
def _share(values):
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(values.dtype, values.shape, LINE, values)


@gluon.jit
def _share_divisors(
    partial, COUNT: gl.constexpr, DTYPE: gl.constexpr, scale_ptr, left,
    METHOD: gl.constexpr, POWER_OF_TWO: gl.constexpr,
):  # fmt: skip
    # Reduces partial maxima [COUNT, 128] of 128 blocks, and stores the scales of the first `left`.
    # Returns the divisors (pre, r, e) in shared memory, and in registers pre and the maxima.
    STACKED: gl.constexpr = gl.BlockedLayout([COUNT, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    ONE_EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    amax = fp32_bits(gl.reduce(partial.load(STACKED), 0, larger), DTYPE)
    amax = gl.convert_layout(amax, ONE_EACH, assert_trivial=True)
    scale = scale_from_bits(amax, METHOD, POWER_OF_TWO)
    each = gl.arange(0, 128, layout=ONE_EACH)
    gl.store(scale_ptr + each, scale, mask=each < left)
    pre, r, e = divisor(amax, scale, METHOD, POWER_OF_TWO)
    r_shared = _share(r)
    if POWER_OF_TWO:  # pre, r and e are equal
        return r_shared, r_shared, r_shared, pre, amax
    else:
        return _share(pre), r_shared, _share(e), pre, amax


@gluon.jit
def _share_largest(values):
    # The largest of 128 values, one for each warp, for _largest_of_warps
    WARPS: gl.constexpr = gl.num_warps()
    return _share(gl.reduce(values.reshape([WARPS, 128 // WARPS]), 1, larger))


@gluon.jit
def _largest_of_warps(of_warps):
    # The same number in every thread
    WARPS: gl.constexpr = gl.num_warps()
    EVERYWHERE: gl.constexpr = gl.BlockedLayout([WARPS], [32], [WARPS], [0])
    return gl.reduce(of_warps.load(EVERYWHERE), 0, larger)


@gluon.jit
def _rows_of_block(block, offs_ptr, groups, tokens, GROUPS: gl.constexpr):
    # groups.rows_of_block, where each warp knows all groups
    EACH: gl.constexpr = gl.BlockedLayout([GROUPS // 32], [32], [gl.num_warps()], [0])
    group = gl.arange(0, GROUPS, layout=EACH)
    end = gl.load(offs_ptr + group, mask=group < groups, other=0)
    begin = gl.load(offs_ptr + group - 1, mask=(group > 0) & (group < groups), other=0)
    return place(block, group, begin, end, tokens)


@gluon.jit
def _cast_tile(
    x, row_ptr, row_scale_ptr, row_scale_ld, col_ptr, col_scale_ptr, col_scale_ld, first_m, tile_m,
    tile_k, rows, words, rows_left, col_left, words_left, DTYPE: gl.constexpr,
    ROWWISE: gl.constexpr, SQUARE: gl.constexpr, POWER_OF_TWO: gl.constexpr, METHOD: gl.constexpr,
    GROUPS: gl.constexpr, PATCH_ROWS: gl.constexpr, WIDTHS: gl.constexpr,
):  # fmt: skip
    # Casts words x[128, WORDS] in the layout of rows, and stores them; of words beyond the tensor,
    # which must be zeros, it stores none.
    LAYOUTS: gl.constexpr = patch_layouts(DTYPE, PATCH_ROWS, 32 // PATCH_ROWS, gl.num_warps())
    BY_ROW: gl.constexpr = LAYOUTS[0]
    BY_COLUMN: gl.constexpr = LAYOUTS[1]
    COLUMNS: gl.constexpr = LAYOUTS[2]
    PER_WORD: gl.constexpr = per_word(DTYPE)
    WORDS: gl.constexpr = 128 // PER_WORD
    QUOTIENT: gl.constexpr = "exact" if POWER_OF_TWO else METHOD
    PARTIAL: gl.constexpr = gl.int32 if PER_WORD == 1 else gl.int16
    DOWN: gl.constexpr = 128 // PATCH_ROWS
    ACROSS: gl.constexpr = WORDS // 4
    ROW_MAJOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    col_m = tile_m.to(gl.int64) * 128
    first_k = tile_k.to(gl.int64) * 128
    first_word = tile_k.to(gl.int64) * WORDS
    m = gl.arange(0, 128, layout=gl.SliceLayout(1, BY_ROW))[:, None]
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, BY_ROW))[None, :]
    inside = (m < rows_left) & (word < words_left)

    magnitude = magnitudes(x, DTYPE)
    if not SQUARE:
        down = largest(magnitude.reshape([DOWN, PATCH_ROWS, WORDS]), 1, DTYPE)
        col_partial = gl.allocate_shared_memory(gl.int32, [DOWN, WORDS], ROW_MAJOR, down)
    if ROWWISE:
        across = larger_half(largest(magnitude.reshape([128, ACROSS, 4]), 2, DTYPE), DTYPE)
        row_partial = gl.allocate_shared_memory(PARTIAL, [ACROSS, 128], _staggered(ACROSS, DTYPE))
        row_partial.permute([1, 0]).store(across)

    if not SQUARE:
        col_pre, col_r, col_e, pre, _ = _share_divisors(
            col_partial._reinterpret(PARTIAL, [DOWN, 128], ROW_MAJOR), DOWN, DTYPE,
            col_scale_ptr + tile_m.to(gl.int64) * col_scale_ld + first_k,
            gl.where(col_left > 0, words_left * PER_WORD, 0) if GROUPS else words_left * PER_WORD,
            METHOD, POWER_OF_TWO,
        )  # fmt: skip
    if ROWWISE:
        row_pre, row_r, row_e, pre_of_rows, amax_of_rows = _share_divisors(
            row_partial, ACROSS, DTYPE,
            row_scale_ptr + tile_k.to(gl.int64) * row_scale_ld + first_m, rows_left,
            METHOD, POWER_OF_TWO,
        )  # fmt: skip
        pre = pre_of_rows if SQUARE else gl.maximum(pre, pre_of_rows)
    MAYBE_TINY: gl.constexpr = DTYPE != gl.float16 and not POWER_OF_TWO
    if SQUARE:
        if ROWWISE:
            amax_of_warps = _share_largest(amax_of_rows)
        else:
            amax = largest(magnitude.reshape([128 * WORDS]), 0, DTYPE)
            amax = fp32_bits(larger_half(amax, DTYPE), DTYPE)
    if MAYBE_TINY:  # rare: elements are multiplied by pre before a cast, and back between two casts
        if SQUARE and not ROWWISE:
            tiny = (amax > 0) & (amax < TINY_BITS)
        else:  # with SQUARE, a tiny tile has a tiny row
            tiny = _largest_of_warps(_share_largest(pre)) > 1.0

    if ROWWISE:
        OF_ROWS: gl.constexpr = gl.SliceLayout(1, BY_ROW)
        if MAYBE_TINY:
            if tiny:
                by = row_pre.load(OF_ROWS)[:, None]
                x = times(x, (by, by), DTYPE)
        r = row_r.load(OF_ROWS)[:, None]
        e = row_e.load(OF_ROWS)[:, None]
        q = bytes_by_row(x, r, e, QUOTIENT, DTYPE)
        row_ld = words * WIDTHS
        target = row_ptr.to(gl.pointer_type(q.dtype)) + first_m * row_ld + first_word
        gl.store(target + (m * row_ld + word), q, mask=inside)

    if SQUARE:  # after the rows, whose cast takes the registers
        if ROWWISE:
            amax = _largest_of_warps(amax_of_warps)
        scale = scale_from_bits(amax, METHOD, POWER_OF_TWO)
        place_of_scale = col_scale_ptr + tile_k.to(gl.int64) * col_scale_ld + tile_m
        gl.store(place_of_scale, scale, mask=col_left > 0 if GROUPS else True)
        tile_pre, tile_r, tile_e = divisor(amax, scale, METHOD, POWER_OF_TWO)
    x = gl.convert_layout(x, BY_COLUMN, assert_trivial=True)
    if MAYBE_TINY:
        if tiny:
            if ROWWISE:
                bits = row_pre.load(gl.SliceLayout(1, BY_COLUMN)).to(gl.int32, bitcast=True)
                back = (0x7F000000 - bits).to(gl.float32, bitcast=True)[:, None]
                x = times(x, (back, back), DTYPE)
            if SQUARE:
                x = times(x, (tile_pre, tile_pre), DTYPE)
            else:
                x = times(x, of_words(col_pre.load(COLUMNS), BY_COLUMN, DTYPE), DTYPE)
    if SQUARE:
        q = bytes_by_column(x, (tile_r, tile_r), (tile_e, tile_e), QUOTIENT, DTYPE)
    else:
        r = of_words(col_r.load(COLUMNS), BY_COLUMN, DTYPE)
        e = of_words(col_e.load(COLUMNS), BY_COLUMN, DTYPE)
        q = bytes_by_column(x, r, e, QUOTIENT, DTYPE)
    m = gl.arange(0, 128, layout=gl.SliceLayout(1, BY_COLUMN))[:, None]
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, BY_COLUMN))[None, :]
    inside = (m < col_left) & (word < words_left)
    target = col_ptr.to(gl.pointer_type(gl.int8)) + first_k * rows + col_m
    target += word * (rows * PER_WORD) + m
    for i in gl.static_range(PER_WORD):
        gl.store(target + i * rows, q[i], mask=inside)
    # otherwise the memory would be reused, after a third barrier
    if not SQUARE:
        col_partial._keep_alive()
    if ROWWISE:
        row_partial._keep_alive()


@gluon.jit(
    do_not_specialize=[
        "rows", "cols", "stride_m", "row_scale_ld", "col_scale_ld", "blocks_k", "groups", "tokens",
        "col_blocks", "y_stride_m", "z_stride_m",
    ]
)  # fmt: skip
def cast_columnwise_kernel(
    x_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, rows, cols, stride_m, row_scale_ld,
    col_scale_ld, blocks_k, offs_ptr, index_ptr, groups, tokens, col_blocks, y_ptr, z_ptr,
    y_stride_m, z_stride_m, row_ptr_1, row_scale_ptr_1, col_ptr_1, col_scale_ptr_1,
    ROWWISE: gl.constexpr, SQUARE: gl.constexpr, POWER_OF_TWO: gl.constexpr, METHOD: gl.constexpr,
    UNIT_M: gl.constexpr, UNIT_K: gl.constexpr, GROUPS: gl.constexpr, INDEXED: gl.constexpr,
    PATCH_ROWS: gl.constexpr, COMPUTE: gl.constexpr, DETAIL: gl.constexpr, SOURCES: gl.constexpr,
    PARTS: gl.constexpr, PER_ROW: gl.constexpr, WIDTHS: gl.constexpr,
):  # fmt: skip
    # One program casts a tile [128, 128], read once. Sizes and strides are in units of UNIT_M rows
    # or UNIT_K words, so that loads, stores and their masks are as wide as a unit. x has `tokens`
    # rows; the columnwise form has `rows` columns, those after the rows of x zeros. With GROUPS, a
    # block lies in one of `groups` groups and fills one of `col_blocks` whole blocks there. With
    # SQUARE, the tile is one block of the columnwise form; col_scale_ld is the distance of
    # neighbours along K then, else along M. With COMPUTE (producer.py), the tile is computed from
    # those of x, y and z, and of two PARTS the second has other outputs.
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
    if INDEXED:
        row = gl.load(index_ptr + first_m + m, mask=m < rows_left, other=0).to(gl.int64)
        x = gl.load(source + (row * stride + word), mask=inside, other=0)
    else:
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
        if PER_ROW:
            source = z_ptr.to(gl.pointer_type(gl.int32)) + first_m
            z = gl.load(source + m, mask=m < rows_left, other=0)
        if PARTS == 2:
            second = COMPUTE(x, y, z, 1, DETAIL, DTYPE)
        x = COMPUTE(x, y, z, 0, DETAIL, DTYPE)

    _cast_tile(
        x, row_ptr, row_scale_ptr, row_scale_ld, col_ptr, col_scale_ptr, col_scale_ld, first_m,
        tile_m, tile_k, rows, words, rows_left, col_left, words_left, DTYPE, ROWWISE, SQUARE,
        POWER_OF_TWO, METHOD, GROUPS, PATCH_ROWS, WIDTHS,
    )  # fmt: skip
    if PARTS == 2:
        _cast_tile(
            second, row_ptr_1, row_scale_ptr_1, row_scale_ld, col_ptr_1, col_scale_ptr_1,
            col_scale_ld, first_m, tile_m, tile_k, rows, words, rows_left, col_left, words_left,
            DTYPE, ROWWISE, SQUARE, POWER_OF_TWO, METHOD, GROUPS, PATCH_ROWS, WIDTHS,
        )  # fmt: skip


def _threads(
    x: Tensor, unit_k: int, row: bool, col: BlockFormat, producer: Producer
) -> tuple[int, dict[str, int]]:
    # Rows of a thread's patch, and options. Without a limit, fewer programs fit on an SM.
    per_word = 4 // x.element_size()
    if producer.compute is None:
        limit = {"maxnreg": 128} if row and unit_k > 1 else {}
        return 16, {"num_warps": 8 // per_word, **limit}
    # A thread holds its patch of every source, and the steps of the computation: more warps share a
    # tile than of a cast alone. The limits are the fastest of docs/experiments/producers.md.
    from_three = len(producer.more) == 2
    light = not from_three and producer.per_row is None
    few = x.dtype == torch.bfloat16 and not col.power_of_two
    if per_word == 2 and not from_three and unit_k > 1 and (few or not light):
        most = 64 if few and col.transposes else 72 if light else 96
        return 8, {"num_warps": 8, "maxnreg": most}
    if from_three and few and unit_k > 1:
        rows, warps, most = (8, 8, 80) if producer.second is None else (4, 16, 64)
        return rows, {"num_warps": warps, "maxnreg": most}
    # With 64 registers, two programs fit on an SM; one program where they would spill much.
    fits = per_word == 2 and (light or (unit_k > 1 and not col.power_of_two))
    return 8 // per_word, {"num_warps": 16, "maxnreg": 64 if fits else 128}


def plan_columnwise(
    x: Tensor,
    row: Quantized | None,
    col: Quantized,
    offs: Tensor | None = None,
    index: Tensor | None = None,
    producer: Producer = NONE,
) -> Launch:
    """The launch that casts ``x[M, K]`` into ``col`` and, unless None, ``row``.

    With ``offs``, by groups; with ``index`` also, of the rows ``x[index]``; or of what ``producer``
    makes of ``x``.
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
    tokens = (x if index is None else index).shape[0]
    groups = 0 if offs is None else offs.shape[0]
    square = col.format.transposes
    return Launch(
        cast_columnwise_kernel,
        (blocks_of(tokens, groups, row is not None) * blocks_k,),
        (x, row_data, row_scale, col.data, col.scale, m // VECTOR_BYTES, k // (per_word * unit_k),
         x.stride(0) // (per_word * unit_k), row_scale.stride(1),
         col.scale.stride(0 if square else 1), blocks_k,
         x if offs is None else offs, x if index is None else index, groups, tokens, num_blocks(m),
         *producer.arguments(x, (row_data, row_scale, *col[:2]), per_word * unit_k)),
        {
            "ROWWISE": row is not None,
            "SQUARE": square,
            "POWER_OF_TWO": col.format.power_of_two,
            "METHOD": method_for(x.dtype),
            "UNIT_M": VECTOR_BYTES,
            "UNIT_K": unit_k,
            "GROUPS": padded_groups(groups),
            "INDEXED": index is not None,
            "PATCH_ROWS": patch_rows,
            **producer.constants(),
        },
        options,
    )  # fmt: skip


def quantize_columnwise(x: Tensor, format: BlockFormat) -> Quantized:
    """See :func:`blocktensor.ops.reference.quantize_columnwise`."""
    return columnwise_by(plan_columnwise, x, format)


def quantize_both(
    x: Tensor, format: BlockFormat, columnwise_format: BlockFormat | None = None
) -> tuple[Quantized, Quantized]:
    """See :func:`blocktensor.ops.reference.quantize_both`; reads ``x`` once."""
    return both_by(plan_columnwise, x, format, columnwise_format)


def quantize_grouped_columnwise(
    x: Tensor, offs: Tensor, index: Tensor | None, format: BlockFormat
) -> Quantized:
    """See :func:`blocktensor.ops.reference.quantize_grouped_columnwise`."""
    return grouped_columnwise_by(plan_columnwise, x, offs, index, format)


def quantize_grouped(
    x: Tensor,
    offs: Tensor,
    index: Tensor | None,
    format: BlockFormat,
    columnwise_format: BlockFormat | None = None,
) -> tuple[Quantized, Quantized]:
    """See :func:`blocktensor.ops.reference.quantize_grouped`; reads ``x`` once."""
    return grouped_by(plan_columnwise, x, offs, index, format, columnwise_format)
