"""The arithmetic of ``ops/cast/numerics.py``: its functions themselves, run on numpy arrays.

With METHOD "corrected", they use multiply-adds in place of divisions. Here: the bytes equal those
of the divisions, for every bf16 and fp16 input. With "refined", for fp32, they do wherever they
might not.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from blocktensor.ops import reference
from blocktensor.ops.cast import numerics
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_1X128_POW2
from tests.support.numeric import e4m3_bytes

f32 = np.float32
BF16 = (np.arange(1, 0x7F80, dtype=np.uint32) << 16).view(f32)  # all positive finite numbers
FP16 = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(f32)


class Lanes(np.ndarray):
    """An array that is converted as Triton's are."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else self.astype(dtype)


def lanes(x: Any, dtype: Any = f32) -> Any:
    return np.asarray(x, dtype).view(Lanes)


def fma(a: Any, b: Any, c: Any) -> Any:
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
    return lanes(s)


def where(condition: Any, a: Any, b: Any) -> Any:
    return lanes(np.where(condition, a, b))


TL = SimpleNamespace(float32=f32, int32=np.int32, fma=fma, where=where, div_rn=np.divide)


def neighbour(x: Any, ulps: Any) -> Any:
    return (x.view(np.int32) + np.int32(ulps)).view(f32)


@pytest.fixture(autouse=True)
def ulps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Run the functions on arrays; the reciprocal is this many ulps above the right one.

    It is documented to be within one ulp of the true one (PTX, rcp.approx).
    """
    off = getattr(request, "param", 0)
    monkeypatch.setattr(numerics, "tl", TL)
    monkeypatch.setattr(numerics, "_approximate_reciprocal", lambda x: neighbour(1 / x, off))
    for name in ("INF_BITS", "TINY_BITS", "TWO_64", "ONE_448TH"):
        monkeypatch.setattr(numerics, name, getattr(numerics, name).value)
    with np.errstate(all="ignore"):
        yield off


every_error = pytest.mark.parametrize("ulps", [-1, 0, 1], indirect=True)


def scale_of(amax: Any, method: str = "corrected", power_of_two: bool = False) -> Any:
    return numerics.scale_from_bits.fn(lanes(amax).view(np.int32), method, power_of_two)


def divisor(amax: Any, scale: Any, method: str = "corrected", power_of_two: bool = False) -> Any:
    return numerics.divisor.fn(lanes(amax).view(np.int32), lanes(scale), method, power_of_two)


def quotient(x: Any, of: Any, method: str = "corrected", power_of_two: bool = False) -> Any:
    return numerics.quotient.fn(lanes(x), *of, method, power_of_two)


def wrong_bytes(x: Any, amax: Any, method: str) -> int:
    """How many quotients of pairs x <= amax give another byte than the IEEE quotient."""
    scale = scale_of(amax)
    got, want = quotient(x, divisor(amax, scale, method), method), x / scale
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


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("method", ["corrected", "refined"])
def test_every_scale_is_the_references(method: str, power_of_two: bool) -> None:
    amax = np.concatenate([BF16, FP16, lanes([0, np.inf, np.nan])])
    format = BLOCKS_1X128_POW2 if power_of_two else BLOCKS_1X128
    want = reference.scale_from_amax(torch.from_numpy(amax), format).numpy()
    np.testing.assert_array_equal(scale_of(amax, method, power_of_two), want)


@every_error
def test_every_quotient_gives_the_right_byte() -> None:
    """Of bf16, x down to 2^-22 of amax: below that every byte is zero.

    Of fp16, one binade of amax stands for all: every quantity is a normal number.
    """
    for first in range(0, len(BF16), 128):
        x = BF16[max(0, first - 22 * 128) : first + 128]
        assert wrong_bytes(x, BF16[first : first + 128, None], "corrected") == 0
    for x in np.split(FP16[-20 * 1024 :], 20):
        assert wrong_bytes(x, FP16[-1024:, None], "corrected") == 0


@pytest.mark.parametrize("amax", [BF16, FP16], ids=["bf16", "fp16"])
@every_error
def test_a_negative_zero_stays_negative(amax: Any, ulps: int) -> None:
    pre, r, e = divisor(amax, scale_of(amax))
    s = scale_of(amax) * pre
    below, above = neighbour(1 / s, ulps - 1), neighbour(1 / s, ulps + 1)
    s = np.float64(s)
    possible = (below * s < 1) & (above * s > 1)  # less than one ulp away
    assert possible.any()
    assert np.signbit(quotient(f32(-0.0), (pre, r, e))[possible]).all()


def test_the_reciprocal_of_a_power_of_two_is_exact() -> None:
    scale = np.append(f32(2) ** np.arange(-126, 121, dtype=f32), lanes([np.inf, np.nan]))
    of = divisor(128 * scale, scale, power_of_two=True)
    want = np.append(np.ones(247, f32), lanes([0, np.nan]))  # as x / scale
    x = np.append(scale[:-2], lanes([3, 3]))
    np.testing.assert_array_equal(quotient(x, of, power_of_two=True), want)


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
    got, want = quotient(x, divisor(448 * s, s, "refined"), "refined"), x / s
    scale = f32(2**-4)  # 5 bits become those of ordinary e4m3 numbers and their midpoints
    np.testing.assert_array_equal(e4m3_bytes(got * scale), e4m3_bytes(want * scale))
    alone = e4m3_bytes(x * (f32(1) / s) * scale)  # the product without what refines it
    assert (alone != e4m3_bytes(want * scale)).any()


def test_refined_quotients_of_tiny_blocks() -> None:
    draw = np.random.default_rng(0)
    bits = draw.integers(1, 1 + 2 ** draw.integers(0, 31, (20_000, 1)), (20_000, 8))
    x = np.sort(bits.astype(np.uint32).view(f32), axis=1)
    assert wrong_bytes(x, x[:, -1:], "refined") == 0


@pytest.mark.parametrize("amax", [1e-44, 1e-30, 1.0, 3e38, np.inf])
def test_refined_quotients_of_zeros_keep_their_sign(amax: float) -> None:
    q = quotient([0.0, -0.0], divisor(amax, scale_of([amax]), "refined"), "refined")
    np.testing.assert_array_equal(np.signbit(q), [False, True])
