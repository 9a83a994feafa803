"""Casts in 128x128 blocks, on words of two 16-bit elements or one fp32 element."""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..formats import BlockFormat, Quantized
from ..runtime.launch import Launch
from ..scale_layouts import empty_quantized
from . import triton_cast
from .gluon_stack import block_of_program, stack_of
from .gluon_words import bytes_by_row, fp32_bits, larger_half, largest, magnitudes, per_word, times
from .numerics import divisor, method_for, scale_from_bits


@gluon.jit
def amax_and_scale(w, DTYPE: gl.constexpr, METHOD: gl.constexpr, POWER_OF_TWO: gl.constexpr):
    """Of the words of one block."""
    WORDS: gl.constexpr = 128 // per_word(DTYPE)
    amax = largest(magnitudes(w, DTYPE).reshape([128 * WORDS]), 0, DTYPE)
    amax = fp32_bits(larger_half(amax, DTYPE), DTYPE)
    return amax, scale_from_bits(amax, METHOD, POWER_OF_TWO)


@gluon.jit
def divided(
    w, amax, scale, DTYPE: gl.constexpr, METHOD: gl.constexpr, POWER_OF_TWO: gl.constexpr
):  # fmt: skip
    """The words of one block, r and e as ``bytes_by_row`` takes them."""
    pre, r, e = divisor(amax, scale, METHOD, POWER_OF_TWO)
    if DTYPE != gl.float16 and not POWER_OF_TWO:
        if pre > 1.0:
            w = times(w, (pre, pre), DTYPE)
    return w, r, e


@gluon.jit(
    do_not_specialize=[
        "rows", "cols", "stride_e", "stride_n", "blocks_n", "blocks_k", "scale_ld",
    ]
)  # fmt: skip
def cast_128x128_kernel(
    w_ptr, data_ptr, scale_ptr, rows, cols, stride_e, stride_n, blocks_n, blocks_k, scale_ld,
    POWER_OF_TWO: gl.constexpr, METHOD: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    # One program casts one block of one matrix of the stack. Columns and strides are in units of
    # UNIT words, so that loads, stores and their masks are as wide as a unit.
    DTYPE: gl.constexpr = w_ptr.dtype.element_ty
    WORDS: gl.constexpr = 128 // per_word(DTYPE)
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 4], [128 // WORDS, WORDS // 4], [gl.num_warps(), 1], [1, 0]
    )
    words = cols * UNIT
    stride = stride_n * UNIT
    matrix, block_n, block_k = block_of_program(blocks_n, blocks_k)
    first_n = block_n.to(gl.int64) * 128
    first_word = block_k.to(gl.int64) * WORDS
    n = gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    inside = (n < rows - block_n * 128) & (word < words - block_k * WORDS)
    source = w_ptr.to(gl.pointer_type(gl.int32)) + matrix * stride_e * UNIT
    source += first_n * stride + first_word
    w = gl.load(source + (n * stride + word), mask=inside, other=0)

    amax, scale = amax_and_scale(w, DTYPE, METHOD, POWER_OF_TWO)
    gl.store(scale_ptr + (matrix * blocks_n + block_n) * scale_ld + block_k, scale)
    w, r, e = divided(w, amax, scale, DTYPE, METHOD, POWER_OF_TWO)
    QUOTIENT: gl.constexpr = "exact" if POWER_OF_TWO else METHOD
    q = bytes_by_row(w, r, e, QUOTIENT, DTYPE)
    target = data_ptr.to(gl.pointer_type(q.dtype)) + (matrix * rows + first_n) * words + first_word
    gl.store(target + (n * words + word), q, mask=inside)


def plan_128x128(w: Tensor, out: Quantized) -> Launch:
    """The launch that casts ``w[..., N, K]`` into ``out``."""
    stack = stack_of(w)
    return Launch(
        cast_128x128_kernel,
        (stack.programs,),
        (w, out.data, out.scale, w.shape[-2], stack.cols, stack.stride_e, stack.stride_n,
         stack.blocks_n, stack.blocks_k, out.scale.stride(-2)),
        {
            "POWER_OF_TWO": out.format.power_of_two,
            "METHOD": method_for(w.dtype),
            "UNIT": stack.unit,
        },
        {"num_warps": 2 * w.element_size(), "enable_fp_fusion": True},
    )  # fmt: skip


def quantize_rowwise(x: Tensor, format: BlockFormat) -> Quantized:
    """See :func:`blocktensor.ops.reference.quantize_rowwise`; Triton casts 1x128 blocks."""
    if format.rows == 1:
        return triton_cast.quantize_rowwise(x, format)
    out = empty_quantized(x.shape, format, x.device)
    plan_128x128(x, out)()
    return out
