"""Hold a 128x128 tile in patches of words: layouts of its registers, and arithmetic on words.

A word is 32 bits of a row: two 16-bit elements, or one of fp32. A thread holds a patch of some rows
by 4 words. Its bytes of a row lie in neighbouring registers and, after the registers are renamed at
no cost, so do its bytes of a column: no element passes between threads.

The arithmetic is the same as in ``numerics.py``. It is in PTX where all steps from words to bytes
must stay together: Triton emits each operation for all elements before the next operation, and all
elements in fp32 take twice the registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def per_word(dtype):
    """Return the number of elements in a word."""
    return 32 // dtype.primitive_bitwidth


@gluon.constexpr_function
def patch_layouts(dtype, rows, lanes_down, num_warps):
    """Return the layouts of a tile's words, by row and by column, and of its 128 columns.

    A patch has ``rows`` rows. ``lanes_down`` lanes of a warp lie down the tile, the others across.
    The layouts by row and by column differ only in the order of a thread's registers.
    """
    per, threads = per_word(dtype), 32 * num_warps
    patches_down, patches_across = 128 // rows, 32 // per
    assert patches_down * patches_across == threads, "one patch a thread"
    row, lane_m, warp_m = _levels(rows, lanes_down, patches_down // lanes_down)
    word, lane_k, warp_k = _levels(4, 32 // lanes_down, patches_across * lanes_down // 32)

    def down(steps):
        return [[step, 0] for step in steps]

    def across(steps):
        return [[0, step] for step in steps]

    lanes, warps = across(lane_k) + down(lane_m), across(warp_k) + down(warp_m)
    shape = [128, 128 // per]
    columns = [
        [[step * per] for step in along] + [[0]] * len(still)
        for along, still in ((lane_k, lane_m), (warp_k, warp_m))
    ]
    return (
        gl.DistributedLinearLayout(across(word) + down(row), lanes, warps, [], shape),
        gl.DistributedLinearLayout(down(row) + across(word), lanes, warps, [], shape),
        gl.DistributedLinearLayout(
            [[1]] * (per - 1) + [[step * per] for step in word], *columns, [], [128]
        ),
    )


@gluon.constexpr_function
def _levels(*counts):
    # for each count, the powers of two below it, times the product of the counts before it
    levels, width = [], 1
    for count in counts:
        levels.append([width << i for i in range(count.bit_length() - 1)])
        width *= count
    return levels


@gluon.constexpr_function
def _cast_ptx(dtype, method, by_row):
    # PTX and constraints of a cast of words to e4m3. By row, a result has 4 elements of a row; by
    # column, one result has the first elements of 4 words, another the second ones. Operands:
    # results, words, r of the words' first elements, r of their second elements, then e likewise.
    halves = per_word(dtype)
    words, results = (4 // halves, 1) if by_row else (4, halves)
    elements = [(word, half) for word in range(words) for half in range(halves)]
    if not by_row:
        elements.sort(key=lambda element: element[1])
    widen = {
        "fp32": ["mov.b32 x, {0};"],
        "bf16": ["shl.b32 x, {0}, 16;", "and.b32 x, {0}, 0xffff0000;"],
        "fp16": [f"mov.b32 {{{{h0, h1}}}}, {{0}}; cvt.f32.f16 x, h{half};" for half in range(2)],
    }[dtype.name]
    divide = {
        "exact": "mul.rn.f32 {y}, x, {r};",
        "corrected": "mul.rn.f32 {y}, x, {e}; fma.rn.f32 {y}, x, {r}, {y};",
        "refined": "mul.rn.f32 {y}, x, {r}; neg.f32 x, x; fma.rn.f32 x, {e}, {y}, x;"
        " neg.f32 x, x; fma.rn.f32 {y}, x, {r}, {y};",
    }[method]
    lines = ["{.reg .b16 h0, h1; .reg .f32 x, y0, y1, y2, y3;"]
    for i in range(4 * results):
        word, half = elements[i]
        x, r, e = [f"${results + word + words * n}" for n in (0, 1 + half, 1 + halves + half)]
        lines += [widen[half].format(x), divide.format(y=f"y{i % 4}", r=r, e=e)]
        if i % 4 == 3:
            lines += [
                "cvt.rn.satfinite.e4m3x2.f32 h0, y1, y0;",
                "cvt.rn.satfinite.e4m3x2.f32 h1, y3, y2;",
                f"mov.b32 ${i // 4}, {{h0, h1}};",
            ]
    operands = ["=&r"] * results + ["r"] * words + ["f"] * (2 * halves * words)
    return " ".join(lines) + "}", ",".join(operands)


@gluon.jit
def bytes_by_row(words, r, e, METHOD: gl.constexpr, DTYPE: gl.constexpr):
    """Return the bytes of words laid out by row (fp32: also by column), one number for each word.

    ``METHOD``: the method of ``numerics.quotient``, or "exact" for power-of-two scales.
    """
    PTX: gl.constexpr = _cast_ptx(DTYPE, METHOD, True)
    if DTYPE == gl.float32:
        return gl.inline_asm_elementwise(
            PTX[0], PTX[1], [words, r, e], dtype=gl.int8, is_pure=True, pack=4
        )
    else:
        return gl.inline_asm_elementwise(
            PTX[0], PTX[1], [words, r, r, e, e], dtype=gl.int16, is_pure=True, pack=2
        )


@gluon.jit
def bytes_by_column(words, r, e, METHOD: gl.constexpr, DTYPE: gl.constexpr):
    """Return the bytes of the first and of the second elements of words laid out by column.

    ``r`` and ``e`` are pairs, see ``of_words``.
    """
    if DTYPE == gl.float32:
        q = bytes_by_row(words, r[0], e[0], METHOD, DTYPE)
        return q, q
    else:
        PTX: gl.constexpr = _cast_ptx(DTYPE, METHOD, False)
        return gl.inline_asm_elementwise(
            PTX[0],
            PTX[1],
            [words, r[0], r[1], e[0], e[1]],
            dtype=(gl.int8, gl.int8),
            is_pure=True,
            pack=4,
        )


@gluon.jit
def of_words(columns, LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """Split values of 128 columns into those for the first and for the second elements of words."""
    WORDS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    if DTYPE == gl.float32:
        first = gl.convert_layout(columns, WORDS, assert_trivial=True)[None, :]
        return first, first
    else:
        first, second = columns.reshape([64, 2]).split()
        first = gl.convert_layout(first, WORDS, assert_trivial=True)[None, :]
        return first, gl.convert_layout(second, WORDS, assert_trivial=True)[None, :]


@gluon.jit
def times(words, by, DTYPE: gl.constexpr):
    """Multiply words (not fp16) exactly by two powers of two, for first and second elements."""
    if DTYPE == gl.float32:
        return (words.to(gl.float32, bitcast=True) * by[0]).to(gl.int32, bitcast=True)
    else:
        return gl.inline_asm_elementwise(
            "{.reg .b32 by; cvt.rn.bf16x2.f32 by, $3, $2; mul.rn.bf16x2 $0, $1, by;}",
            "=r,r,f,f",
            [words, by[0], by[1]],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )


@gluon.jit
def magnitudes(words, DTYPE: gl.constexpr):
    """Return |x| of words, as integers in the same order as |x|, NaN above Inf."""
    if DTYPE == gl.float32:
        return words & 0x7FFFFFFF
    else:
        return words & 0x7FFF7FFF


@gluon.jit
def largest(words, AXIS: gl.constexpr, DTYPE: gl.constexpr):
    """Return the maxima of words along an axis, separately for both elements of a word."""
    if DTYPE == gl.float32:
        return gl.reduce(words, AXIS, larger)
    else:
        return gl.reduce(words, AXIS, _larger_halves)


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _larger_halves(a, b):
    return gl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def larger_half(words, DTYPE: gl.constexpr):
    """Return the larger of the two elements of each word, in 16 bits; for fp32, the word itself."""
    if DTYPE == gl.float32:
        return words
    else:
        return gl.maximum(words & 0xFFFF, words >> 16).to(gl.int16)


@gluon.jit
def fp32_bits(bits, DTYPE: gl.constexpr):
    """Convert the bits of numbers in ``DTYPE`` to their bits in fp32."""
    if DTYPE == gl.float32:
        return bits
    else:
        return bits.to(DTYPE, bitcast=True).to(gl.float32).to(gl.int32, bitcast=True)
