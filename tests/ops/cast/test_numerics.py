"""The arithmetic of ``ops/cast/numerics.py``, repeated in numpy and enumerated.

With METHOD "corrected", ``scale_from_bits`` and ``divisor``/``quotient`` use multiply-adds in place
of divisions. Here: the bytes equal those of the divisions, for every bf16 and fp16 input. With
"refined", for fp32, they do wherever they might not.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.numeric import e4m3_bytes

f32 = np.float32
BF16 = (np.arange(1, 0x7F80, dtype=np.uint32) << 16).view(f32)  # all positive finite numbers
FP16 = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(f32)


@pytest.fixture(autouse=True)
def no_numpy_warnings() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a * b + c`` rounded once to fp32.

    The product is exact in float64, and a second rounding of the sum is harmless, except where the
    first hits a midpoint of fp32: there its error (by Knuth's two-sum) says on which side it lies.
    """
    p, c = np.float64(a) * np.float64(b), np.float64(c)
    s = np.asarray(p + c)
    middle = s.view(np.int64) & (2**28 - 1) == 0  # or another number of few bits
    p, c = (np.broadcast_to(x, s.shape)[middle] for x in (p, c))
    t = s[middle] - p
    error = (p - (s[middle] - t)) + (c - t)
    moved = np.nextafter(s[middle], np.copysign(np.inf, error))
    s[middle] = np.where(error != 0, moved, s[middle])
    return s.astype(f32)


def true_scale(amax: np.ndarray) -> np.ndarray:
    scale = amax / f32(448)
    return np.where(scale == 0, f32(1), scale)


def cheap_scale(amax: np.ndarray) -> np.ndarray:
    """``scale_from_bits`` of finite amaxes."""
    inverse = f32(1) / f32(448)
    first = amax * inverse
    scale = fma(fma(first, f32(-448), amax), inverse, first)
    return np.where(scale == 0, f32(1), scale)


def neighbour(x: np.ndarray, ulps: int) -> np.ndarray:
    return (x.view(np.int32) + np.int32(ulps)).view(f32)


def divisor(amax: np.ndarray, ulps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``divisor`` where the hardware's reciprocal is ``ulps`` above the correctly rounded one."""
    pre = np.where(amax < f32(2**-60), f32(2**64), f32(1))
    s = true_scale(amax) * pre
    r = neighbour(1 / s, ulps)
    r = np.where(fma(-s, r, f32(1)) < 0, neighbour(r, -1), r)
    return pre, r, fma(-s, r, f32(1)) * r


def quotient(x: np.ndarray, pre: np.ndarray, r: np.ndarray, e: np.ndarray) -> np.ndarray:
    y = x * pre
    return fma(y, r, y * e)


def wrong_bytes(amax: np.ndarray, x: np.ndarray, ulps: int) -> int:
    """How many quotients of pairs x <= amax give another byte than the IEEE quotient."""
    amax = amax[:, None]
    got, want = quotient(x, *divisor(amax, ulps)), x / true_scale(amax)
    differ = (got != want) & (x <= amax)
    return int((e4m3_bytes(got[differ]) != e4m3_bytes(want[differ])).sum())


def test_fma_rounds_once() -> None:
    one, tiny = f32(1), f32(2**-23)
    halfway = (one + tiny) * f32(2**-24)  # a little more than half an ulp of 1
    assert fma(one + tiny, f32(2**-24), np.array([one])) == one + tiny
    assert one + halfway == one + tiny
    # 1 + 2^-24 + 2^-60 lies above the tie; float64 alone would round it to the tie, then to even.
    assert fma(f32(2**-24), f32(1), np.array([one])) == one
    assert fma(f32(2**-12 + 2**-35), f32(2**-12), np.array([one])) == one + tiny
    # Subnormal results round once too: 3/4 of the smallest number.
    assert fma(f32(2**-75), f32(2**-75), np.array([f32(0)])) == 0
    assert fma(f32(1.5 * 2**-75), f32(2**-75), np.array([f32(0)])) == f32(2**-149)


@pytest.mark.parametrize("amax", [BF16, FP16], ids=["bf16", "fp16"])
def test_every_scale_is_the_rounded_quotient(amax: np.ndarray) -> None:
    np.testing.assert_array_equal(cheap_scale(amax), true_scale(amax))


@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_every_quotient_gives_the_right_byte(ulps: int) -> None:
    """Of bf16, x down to 2^-22 of amax: below that every byte is zero.

    Of fp16, one binade of amax stands for all: every quantity is a normal number.
    """
    for first in range(0, len(BF16), 128):
        x = BF16[max(0, first - 22 * 128) : first + 128]
        assert wrong_bytes(BF16[first : first + 128], x, ulps) == 0
    for x in np.split(FP16[-20 * 1024 :], 20):
        assert wrong_bytes(FP16[-1024:], x, ulps) == 0


def test_uncorrected_quotients_give_wrong_bytes() -> None:
    """Else the two tests above would test nothing."""
    amax, x = BF16[0x3F80:0x4000], BF16[0x3F80 - 22 * 128 : 0x4000]
    got, want = x * (1 / true_scale(amax))[:, None], x / true_scale(amax)[:, None]
    inside = x <= amax[:, None]
    assert (e4m3_bytes(got) != e4m3_bytes(want))[inside].any()


@pytest.mark.parametrize("amax", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_a_negative_zero_stays_negative(amax: np.ndarray, ulps: int) -> None:
    """The reciprocal is documented to be within one ulp of the true one (PTX, rcp.approx)."""
    pre, r, e = divisor(amax, ulps)
    s = np.float64(true_scale(amax) * pre)
    below, above = neighbour(1 / f32(s), ulps - 1), neighbour(1 / f32(s), ulps + 1)
    possible = (below * s < 1) & (above * s > 1)  # less than one ulp away
    assert possible.any()
    assert np.signbit(quotient(f32(-0.0), pre, r, e)[possible]).all()


def test_the_reciprocal_of_a_power_of_two_is_exact() -> None:
    scale = f32(2) ** np.arange(-126, 121, dtype=f32)
    reciprocal = (np.int32(0x7F000000) - scale.view(np.int32)).view(f32)
    np.testing.assert_array_equal(scale * reciprocal, np.ones_like(scale))


def refined_quotient(x: np.ndarray, amax: np.ndarray) -> np.ndarray:
    """``quotient`` by ``divisor`` with METHOD "refined"."""
    pre = np.where((amax < f32(2**-60)) & (amax > 0), f32(2**64), f32(1))
    s = true_scale(amax) * pre
    r, e = f32(1) / s, np.where(np.isposinf(amax), f32(0), s)
    y = x * pre
    q = y * r
    return fma(-fma(e, q, -y), r, q)


def test_a_refined_quotient_rounds_as_a_division_next_to_every_boundary() -> None:
    """It errs by less than 2^-45 of the quotient x / s.

    So a byte may differ only where x / s lies that close to b, half an ulp beside the midpoint of
    two e4m3 numbers. In integers, x 2^24 or 2^25 = s b + d with a small d. A midpoint has 5 bits,
    so b = m 2^20 +- 1, and the last 20 bits of s are those of d or -d: every such s is tried.
    """
    around = np.arange(-64, 65) + (np.arange(8, 17) << 20)[:, None]
    s = np.append(around, np.random.default_rng(0).integers(2**23, 2**24, 1000))
    s = s[(s >= 2**23) & (s < 2**24)].astype(f32)[:, None, None, None]
    midpoints = np.arange(16, 32)[:, None, None]
    boundaries = midpoints + np.array([-1, 0, 1])[:, None] * 2.0**-20
    nearest = (np.float64(s) * boundaries).astype(f32)
    x = neighbour(nearest, np.arange(-3, 4))
    y = x * (f32(1) / s)
    got, want = fma(-fma(s, y, -x), f32(1) / s, y), x / s
    scale = f32(2**-4)  # 5 bits become those of ordinary e4m3 numbers and their midpoints
    np.testing.assert_array_equal(e4m3_bytes(got * scale), e4m3_bytes(want * scale))
    assert (e4m3_bytes(y * scale) != e4m3_bytes(want * scale)).any()  # the product alone would not


def test_refined_quotients_of_tiny_blocks() -> None:
    bits = np.random.default_rng(0).integers(1, 2**23 * 90, (20_000, 8)).astype(np.uint32)
    x = np.sort(bits.view(f32), axis=1)
    amax = x[:, -1:]
    np.testing.assert_array_equal(
        e4m3_bytes(refined_quotient(x, amax)), e4m3_bytes(x / true_scale(amax))
    )


@pytest.mark.parametrize("amax", [1e-44, 1e-30, 1.0, 3e38, np.inf])
def test_refined_quotients_of_zeros_keep_their_sign(amax: float) -> None:
    q = refined_quotient(np.array([0.0, -0.0], f32), np.array([amax], f32))
    np.testing.assert_array_equal(np.signbit(q), [False, True])
    np.testing.assert_array_equal(q, [0, 0])


def test_refined_quotients_of_infinite_blocks() -> None:
    x = np.array([1, -1, np.inf, -np.inf, np.nan], f32)
    q = refined_quotient(x, np.array([np.inf], f32))
    np.testing.assert_array_equal(q, x / np.array([np.inf], f32))
    np.testing.assert_array_equal(np.signbit(q[:2]), [False, True])
