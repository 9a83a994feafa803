"""Cast in 128x128 blocks, with or without the transpose, on 32-bit words of elements."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..formats import BlockFormat, Quantized, num_blocks
from ..runtime.launch import Launch
from ..scale_layouts import VECTOR_BYTES, empty_quantized
from . import triton_cast
from .gluon_words import (
    bytes_by_column,
    bytes_by_row,
    fp32_bits,
    larger_half,
    largest,
    magnitudes,
    patch_layouts,
    per_word,
    times,
)
from .numerics import divisor, method_for, scale_from_bits

_WORD_BYTES = 4
_WORDS_OF_VECTOR = 4


@gluon.jit
def block_of_program(blocks_n, blocks_k):
    """Return the matrix (int64), and the row and column among its blocks."""
    block = gl.program_id(0)
    matrix = (block // (blocks_k * blocks_n)).to(gl.int64)
    return matrix, block // blocks_k % blocks_n, block % blocks_k


class Stack(NamedTuple):
    """Sizes of the matrices, for kernels; columns and strides are in units of words.

    Attributes:
        programs: the number of programs, one for each block.
        unit: the number of words that one instruction can load, in every row.
        stride_e, stride_n: from one matrix to the next, and from one row.
    """

    programs: int
    blocks_n: int
    blocks_k: int
    unit: int
    cols: int
    stride_e: int
    stride_n: int


def stack_of(x: Tensor) -> Stack:
    """Describe ``x``, a matrix or a stack of them, whose rows are whole words of unit stride."""
    n, k = x.shape[-2:]
    matrices, stride_e = (x.shape[0], x.stride(0)) if x.ndim == 3 else (1, 0)
    blocks_n, blocks_k = num_blocks(n), num_blocks(k)
    of_word = _WORD_BYTES // x.element_size()
    is_even = (k | x.stride(-2) | stride_e) % (_WORDS_OF_VECTOR * of_word) == 0
    unit = _WORDS_OF_VECTOR if is_even else 1
    sizes = (size // (of_word * unit) for size in (k, stride_e, x.stride(-2)))
    return Stack(matrices * blocks_n * blocks_k, blocks_n, blocks_k, unit, *sizes)


@gluon.constexpr_function
def _layouts(dtype, transposes, num_warps):
    """Return the layout of a block's words by row, and by column if it ``transposes``."""
    if transposes:
        patch_rows = 16
        return patch_layouts(dtype, patch_rows, 32 // patch_rows, num_warps)[:2]
    words = 128 // per_word(dtype)
    lanes = [128 // words, words // 4]
    return gl.BlockedLayout([1, 4], lanes, [num_warps, 1], [1, 0]), None


@gluon.jit
def amax_and_scale(w, DTYPE: gl.constexpr, METHOD: gl.constexpr, POWER_OF_TWO: gl.constexpr):
    """Return amax and scale of the words of one block."""
    WORDS: gl.constexpr = 128 // per_word(DTYPE)
    amax = largest(magnitudes(w, DTYPE).reshape([128 * WORDS]), 0, DTYPE)
    amax = fp32_bits(larger_half(amax, DTYPE), DTYPE)
    return amax, scale_from_bits(amax, METHOD, POWER_OF_TWO)


@gluon.jit
def divided(w, amax, scale, DTYPE: gl.constexpr, METHOD: gl.constexpr, POWER_OF_TWO: gl.constexpr):
    """Return the words of one block, r and e as ``bytes_by_row`` takes them."""
    pre, r, e = divisor(amax, scale, METHOD, POWER_OF_TWO)
    if DTYPE != gl.float16 and not POWER_OF_TWO:
        if pre > 1.0:
            w = times(w, (pre, pre), DTYPE)
    return w, r, e


@gluon.jit(
    do_not_specialize=[
        "rows",
        "cols",
        "stride_e",
        "stride_n",
        "blocks_n",
        "blocks_k",
        "row_scale_ld",
        "col_scale_ld",
    ]
)
def cast_128x128_kernel(
    w_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, rows, cols, stride_e, stride_n, blocks_n,
    blocks_k, row_scale_ld, col_scale_ld, POWER_OF_TWO: gl.constexpr, METHOD: gl.constexpr,
    UNIT_N: gl.constexpr, UNIT_K: gl.constexpr, TRANSPOSES: gl.constexpr,
):  # fmt: skip
    # One program casts one block of one matrix of the stack. Sizes and strides are in units of
    # UNIT_N rows and UNIT_K words, so that loads, stores and their masks are as wide as a unit.
    # TRANSPOSES: it also writes the transpose, into col_ptr.
    DTYPE: gl.constexpr = w_ptr.dtype.element_ty
    PER_WORD: gl.constexpr = per_word(DTYPE)
    WORDS: gl.constexpr = 128 // PER_WORD
    LAYOUTS: gl.constexpr = _layouts(DTYPE, TRANSPOSES, gl.num_warps())
    BY_ROW: gl.constexpr = LAYOUTS[0]
    BY_COLUMN: gl.constexpr = LAYOUTS[1]
    rows = rows * UNIT_N
    words = cols * UNIT_K
    stride = stride_n * UNIT_K
    matrix, block_n, block_k = block_of_program(blocks_n, blocks_k)
    first_n = block_n.to(gl.int64) * 128
    first_k = block_k.to(gl.int64) * 128
    first_word = block_k.to(gl.int64) * WORDS
    rows_left = rows - block_n * 128
    words_left = words - block_k * WORDS
    n = gl.arange(0, 128, layout=gl.SliceLayout(1, BY_ROW))[:, None]
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, BY_ROW))[None, :]
    inside = (n < rows_left) & (word < words_left)
    source = w_ptr.to(gl.pointer_type(gl.int32)) + matrix * stride_e * UNIT_K
    source += first_n * stride + first_word
    w = gl.load(source + (n * stride + word), mask=inside, other=0)

    amax, scale = amax_and_scale(w, DTYPE, METHOD, POWER_OF_TWO)
    gl.store(row_scale_ptr + (matrix * blocks_n + block_n) * row_scale_ld + block_k, scale)
    w, r, e = divided(w, amax, scale, DTYPE, METHOD, POWER_OF_TWO)
    QUOTIENT: gl.constexpr = "exact" if POWER_OF_TWO else METHOD
    q = bytes_by_row(w, r, e, QUOTIENT, DTYPE)
    target = row_ptr.to(gl.pointer_type(q.dtype)) + (matrix * rows + first_n) * words + first_word
    gl.store(target + (n * words + word), q, mask=inside)

    if TRANSPOSES:
        gl.store(col_scale_ptr + (matrix * blocks_k + block_k) * col_scale_ld + block_n, scale)
        w = gl.convert_layout(w, BY_COLUMN, assert_trivial=True)
        q = bytes_by_column(w, (r, r), (e, e), QUOTIENT, DTYPE)
        n = gl.arange(0, 128, layout=gl.SliceLayout(1, BY_COLUMN))[:, None]
        word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, BY_COLUMN))[None, :]
        inside = (n < rows_left) & (word < words_left)
        target = col_ptr.to(gl.pointer_type(gl.int8))
        target += (matrix * (words * PER_WORD) + first_k) * rows + first_n
        target += word * (rows * PER_WORD) + n
        for i in gl.static_range(PER_WORD):
            gl.store(target + i * rows, q[i], mask=inside)


def _plan(w: Tensor, row: Quantized, col: Quantized | None) -> Launch:
    """Plan the launch that casts ``w[..., N, K]`` into ``row``, and its transpose into ``col``."""
    n = w.shape[-2]
    stack, unit_n, transpose = stack_of(w), 1, row
    if col is not None:
        assert n % VECTOR_BYTES == 0
        unit_n, transpose = VECTOR_BYTES, col
    return Launch(
        cast_128x128_kernel,
        (stack.programs,),
        (w, row.data, row.scale, transpose.data, transpose.scale, n // unit_n, stack.cols,
         stack.stride_e, stack.stride_n, stack.blocks_n, stack.blocks_k, row.scale.stride(-2),
         transpose.scale.stride(-2)),
        {
            "POWER_OF_TWO": row.format.power_of_two,
            "METHOD": method_for(w.dtype),
            "UNIT_N": unit_n,
            "UNIT_K": stack.unit,
            "TRANSPOSES": col is not None,
        },
        {"num_warps": 2 * w.element_size(), "enable_fp_fusion": True},
    )  # fmt: skip


def quantize_rowwise(x: Tensor, format: BlockFormat) -> Quantized:
    """See :func:`blocktensor.ops.reference.quantize_rowwise`; Triton casts 1x128 blocks."""
    if format.rows == 1:
        return triton_cast.quantize_rowwise(x, format)
    out = empty_quantized(x.shape, format, x.device)
    _plan(x, out, None)()
    return out


def quantize_with_transpose(w: Tensor, format: BlockFormat) -> tuple[Quantized, Quantized]:
    """See :func:`blocktensor.ops.reference.quantize_with_transpose`; rows in whole vectors."""
    row = empty_quantized(w.shape, format, w.device)
    col = empty_quantized(w.mT.shape, format, w.device)
    _plan(w, row, col)()
    return row, col
