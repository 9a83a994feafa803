"""Compute a scale from an amax, and the exact quotient x / scale, on the device, for all casts.

METHOD selects the computation. Each method gives the reference's bytes for its dtypes; power-of-two
scales need none, since their reciprocal is exact:

- ``"corrected"``, bf16 and fp16: multiply-adds only. amax / 448 is exact for every bf16 and fp16
  amax; x / scale rounds to e4m3 as the IEEE quotient does (tests/ops/cast/test_numerics.py
  enumerates both).
- ``"refined"``, fp32: one division a block; the product of an element and the reciprocal is
  corrected by the remainder. This rounds as a division does, except perhaps where the scale is
  within some ulps of a number of 4 bits; the bytes are equal there too (enumerated in the same
  file).
"""

import torch
import triton
import triton.language as tl

from ..formats import BLOCK

INF_BITS = tl.constexpr(0x7F800000)
TINY_BITS = tl.constexpr(0x21800000)  # 2^-60: below it, x and scale are first multiplied by 2^64
TWO_64 = tl.constexpr(18446744073709551616.0)
ONE_448TH = tl.constexpr(0.002232142956927418708801)  # fp32(1 / 448)


@triton.jit
def magnitude_bits(x):
    # |x| as an integer: ordered like |x|, with NaN above Inf, so that an integer maximum is an
    # amax that propagates both.
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_from_bits(amax_bits, METHOD: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    # reference.scale_from_amax, from the amax's bits
    amax = amax_bits.to(tl.float32, bitcast=True)
    finite = amax_bits < INF_BITS
    if METHOD == "corrected":
        first = amax * ONE_448TH
        rest = tl.fma(first, -448.0, amax)
        scale = tl.fma(rest, ONE_448TH, first)
        scale = tl.where(finite, scale, amax)
    else:
        scale = tl.div_rn(amax, 448.0)
    if POWER_OF_TWO:
        rounded_up = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(finite, rounded_up.to(tl.float32, bitcast=True), scale)
    scale = tl.where(scale == 0.0, 1.0, scale)
    return tl.where(amax_bits > INF_BITS, float("nan"), scale)


@triton.jit
def _approximate_reciprocal(x):
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def divisor(amax_bits, scale, METHOD: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    # The operands (pre, r, e) of `quotient`, computed once a block.
    if POWER_OF_TWO:  # 1 / scale, from its bits; Inf and NaN blocks multiply by 0 and NaN
        bits = scale.to(tl.int32, bitcast=True)
        r = (0x7F000000 - bits).to(tl.float32, bitcast=True)
        r = tl.where(amax_bits < INF_BITS, r, tl.where(amax_bits == INF_BITS, 0.0, scale))
        return r, r, r
    elif METHOD == "corrected":
        pre = tl.where((amax_bits < TINY_BITS) & (amax_bits > 0), TWO_64, 1.0)
        s = scale * pre
        r = _approximate_reciprocal(s)
        # r <= 1/s makes e >= 0, so that a negative zero stays negative
        e = tl.fma(-s, r, 1.0)
        r = tl.where(e < 0, (r.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True), r)
        e = tl.where(amax_bits < INF_BITS, tl.fma(-s, r, 1.0) * r, 0.0)
        return pre, r, e
    else:
        pre = tl.where((amax_bits < TINY_BITS) & (amax_bits > 0), TWO_64, 1.0)
        s = scale * pre
        return pre, tl.div_rn(1.0, s), tl.where(amax_bits == INF_BITS, 0.0, s)


@triton.jit
def quotient(x, pre, r, e, METHOD: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    # A number that rounds to e4m3 as x / scale does; (pre, r, e) broadcast against x.
    if POWER_OF_TWO:
        return x.to(tl.float32) * r
    elif METHOD == "corrected":  # x*r + x*(1 - s*r)*r: the error left is of second order
        y = (x * pre.to(x.dtype)).to(tl.float32)  # exact in 16 bits, two elements at a time
        return tl.fma(y, r, y * e)
    else:  # e is the scale. Multiplied by -1, since Triton's -x is 0 - x, which loses a zero's sign
        y = x * pre
        q = y * r
        return tl.fma(tl.fma(e, q, y * -1.0) * -1.0, r, q)


@triton.jit
def on_grid(x, GROUP_ROWS: tl.constexpr, GROUP_COLS: tl.constexpr):
    # A tile on the grid of MXFP4, or itself without groups.
    if GROUP_ROWS == 0:
        return x
    else:
        return on_mxfp4_grid(x, GROUP_ROWS, GROUP_COLS)


@triton.jit
def on_mxfp4_grid(x, GROUP_ROWS: tl.constexpr, GROUP_COLS: tl.constexpr):
    # reference.on_mxfp4_grid of a tile of whole groups, in fp32. Groups are one row or one column.
    rows: tl.constexpr = x.shape[0]
    cols: tl.constexpr = x.shape[1]
    wide = x.to(tl.float32)
    if GROUP_ROWS == 1:
        groups = tl.reshape(wide, [rows * cols // GROUP_COLS, GROUP_COLS])
    else:
        groups = tl.reshape(wide, [rows // GROUP_ROWS, GROUP_ROWS, cols])
    amax = tl.max(magnitude_bits(groups), 1, keep_dims=True)
    exponent = (amax >> 23) - 2 + ((amax & 0x7FFFFF) > 0x400000).to(tl.int32)
    exponent = tl.minimum(exponent, 252)
    power = tl.where(exponent > 0, exponent << 23, 1 << 22)
    scale = power.to(tl.float32, bitcast=True)
    inverse = tl.where(exponent > 0, (254 - exponent) << 23, 254 << 23)
    inverse = tl.where(amax < INF_BITS, inverse, 0x7FC00000).to(tl.float32, bitcast=True)
    bits = groups.to(tl.int32, bitcast=True)
    numbers = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True) * inverse
    numbers = tl.minimum(numbers, 6.0, propagate_nan=tl.PropagateNan.ALL)
    # 1.5 * 2^23 steps, of which a step is half of the number's power of two, at least 0.5: sums
    # with them are rounded to multiples of the step
    power_bits = tl.maximum(numbers.to(tl.int32, bitcast=True) & 0x7F800000, 127 << 23)
    large = (power_bits + ((22 << 23) | 0x400000)).to(tl.float32, bitcast=True)
    made = ((numbers + large) - large) * scale
    made = (made.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (bits & -2147483648)
    return tl.reshape(made.to(tl.float32, bitcast=True), [rows, cols])


def method_for(dtype: torch.dtype) -> str:
    """Return the method of ``numerics.py`` that gives the reference's bytes for this dtype."""
    return "refined" if dtype == torch.float32 else "corrected"


def is_wide(*strides: int) -> bool:
    """Return True if offsets inside a block with these strides need 64 bits."""
    return any(abs(stride) * BLOCK >= 2**31 for stride in strides)
