"""Casts in 128x128 blocks, alone or with their transpose, of words as they lie."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..layouts import Form, num_blocks
from ..triton.launch import Launch
from ..triton.numerics import divisor, scale_from_bits
from .patches import (
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


@gluon.jit(
    do_not_specialize=[
        "rows", "cols", "stride_e", "stride_n", "blocks_n", "blocks_k", "scale_ld", "scale_t_ld",
    ]
)  # fmt: skip
def cast_128x128_kernel(
    w_ptr,
    data_ptr,
    scale_ptr,
    data_t_ptr,
    scale_t_ptr,
    rows,
    cols,
    stride_e,
    stride_n,
    blocks_n,
    blocks_k,
    scale_ld,
    scale_t_ld,
    TRANSPOSED: gl.constexpr,
    POWER_OF_TWO: gl.constexpr,
    METHOD: gl.constexpr,
    UNIT_N: gl.constexpr,
    UNIT_K: gl.constexpr,
):
    # One program casts one block of one matrix of the stack. Sizes and strides come as multiples of
    # UNIT_N rows and UNIT_K words, as in ops/gluon/columnwise.py.
    DTYPE: gl.constexpr = w_ptr.dtype.element_ty
    PER_WORD: gl.constexpr = per_word(DTYPE)
    WORDS: gl.constexpr = 128 // PER_WORD
    LAYOUTS: gl.constexpr = patch_layouts(DTYPE, 16, 2, gl.num_warps())
    BY_ROW: gl.constexpr = LAYOUTS[0]
    BY_COLUMN: gl.constexpr = LAYOUTS[1]
    QUOTIENT: gl.constexpr = "exact" if POWER_OF_TWO else METHOD
    rows = rows * UNIT_N
    words = cols * UNIT_K
    stride = stride_n * UNIT_K
    block = gl.program_id(0)
    block_k = block % blocks_k
    block_n = block // blocks_k % blocks_n
    matrix = (block // (blocks_k * blocks_n)).to(gl.int64)
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

    amax = largest(magnitudes(w, DTYPE).reshape([128 * WORDS]), 0, DTYPE)
    amax = fp32_bits(larger_half(amax, DTYPE), DTYPE)
    scale = scale_from_bits(amax, METHOD, POWER_OF_TWO)
    gl.store(scale_ptr + (matrix * blocks_n + block_n) * scale_ld + block_k, scale)
    pre, r, e = divisor(amax, scale, METHOD, POWER_OF_TWO)
    if DTYPE != gl.float16 and not POWER_OF_TWO:
        if pre > 1.0:
            w = times(w, (pre, pre), DTYPE)
    q = bytes_by_row(w, r, e, QUOTIENT, DTYPE)
    target = data_ptr.to(gl.pointer_type(q.dtype)) + (matrix * rows + first_n) * words + first_word
    gl.store(target + (n * words + word), q, mask=inside)

    if TRANSPOSED:
        gl.store(scale_t_ptr + (matrix * blocks_k + block_k) * scale_t_ld + block_n, scale)
        w = gl.convert_layout(w, BY_COLUMN, assert_trivial=True)
        q = bytes_by_column(w, (r, r), (e, e), QUOTIENT, DTYPE)
        n = gl.arange(0, 128, layout=gl.SliceLayout(1, BY_COLUMN))[:, None]
        word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, BY_COLUMN))[None, :]
        inside = (n < rows_left) & (word < words_left)
        target = data_t_ptr.to(gl.pointer_type(gl.int8))
        target += (matrix * (words * PER_WORD) + first_k) * rows + first_n
        target += word * (rows * PER_WORD) + n
        for i in gl.static_range(PER_WORD):
            gl.store(target + i * rows, q[i], mask=inside)


def plan_128x128(w: Tensor, form: Form, transposed: Form | None, power_of_two: bool) -> Launch:
    """The launch that casts ``w[..., N, K]`` into ``form``, and its transpose unless None."""
    n, k = w.shape[-2:]
    experts, stride_e = (w.shape[0], w.stride(0)) if w.ndim == 3 else (1, 0)
    blocks_n, blocks_k = num_blocks(n), num_blocks(k)
    data_t, scale_t = transposed or form
    per_word = 4 // w.element_size()
    unit_n = 1 if transposed is None else 16 if n % 16 == 0 else 4
    unit_k = 4 if (k | w.stride(-2) | stride_e) % (4 * per_word) == 0 else 1
    step = per_word * unit_k
    return Launch(
        cast_128x128_kernel,
        (experts * blocks_n * blocks_k,),
        (w, *form, data_t, scale_t, n // unit_n, k // step, stride_e // step, w.stride(-2) // step,
         blocks_n, blocks_k, form[1].stride(-2), scale_t.stride(-2)),
        {
            "TRANSPOSED": transposed is not None,
            "POWER_OF_TWO": power_of_two,
            "METHOD": "refined" if w.dtype == torch.float32 else "corrected",
            "UNIT_N": unit_n,
            "UNIT_K": unit_k,
        },
        {"num_warps": 8 // per_word},
    )  # fmt: skip
