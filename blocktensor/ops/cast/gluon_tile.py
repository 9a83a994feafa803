"""Cast a tile in registers, columnwise or both ways, and store it from registers.

Only block maxima and values derived from them pass between threads, through shared memory and two
barriers: each thread's maxima of its patch (gluon_words.py), then the scale of each block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..runtime.triton_compat.gluon import reinterpret
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
from .numerics import TINY_BITS, divisor, scale_from_bits


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
    partial,
    COUNT: gl.constexpr,
    DTYPE: gl.constexpr,
    scale_ptr,
    left,
    METHOD: gl.constexpr,
    POWER_OF_TWO: gl.constexpr,
):
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
def cast_tile(
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
            reinterpret(col_partial, PARTIAL, [DOWN, 128], ROW_MAJOR),
            DOWN,
            DTYPE,
            col_scale_ptr + tile_m.to(gl.int64) * col_scale_ld + first_k,
            gl.where(col_left > 0, words_left * PER_WORD, 0) if GROUPS else words_left * PER_WORD,
            METHOD,
            POWER_OF_TWO,
        )
    if ROWWISE:
        row_pre, row_r, row_e, pre_of_rows, amax_of_rows = _share_divisors(
            row_partial,
            ACROSS,
            DTYPE,
            row_scale_ptr + tile_k.to(gl.int64) * row_scale_ld + first_m,
            rows_left,
            METHOD,
            POWER_OF_TWO,
        )
        pre = pre_of_rows if SQUARE else gl.maximum(pre, pre_of_rows)
    MAYBE_TINY: gl.constexpr = DTYPE != gl.float16 and not POWER_OF_TWO
    if SQUARE:
        if ROWWISE:
            amax_of_warps = _share_largest(amax_of_rows)
        else:
            amax = largest(magnitude.reshape([128 * WORDS]), 0, DTYPE)
            amax = fp32_bits(larger_half(amax, DTYPE), DTYPE)
    if MAYBE_TINY:  # rare: multiply elements by pre before a cast, and undo it between two casts
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
