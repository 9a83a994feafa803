"""The arithmetic of ``ops/triton/numerics.py``, repeated in numpy and enumerated.

``scale_from_bits`` and ``divisor``/``quotient`` with METHOD "corrected" use multiply-adds in place of
divisions. Here: they equal the divisions, for every input a cast of bf16 or fp16 can meet.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.numeric import e4m3_bytes

f32 = np.float32

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def quiet():
    with np.errstate(under="ignore", over="ignore", invalid="ignore"):
        yield


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a * b + c`` rounded once to fp32 (normal results).

    The product is exact in float64. The sum may not be: its error, found by Knuth's two-sum, decides
    where the rounded sum lies halfway between two fp32 numbers.
    """
    p, c = np.float64(a) * np.float64(b), np.float64(c)
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    halfway = (s.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    nudged = np.where(halfway & (error != 0), np.nextafter(s, np.copysign(np.inf, error)), s)
    return nudged.astype(f32)


def true_scale(amax: np.ndarray) -> np.ndarray:
    return amax / f32(448)


def cheap_scale(amax: np.ndarray) -> np.ndarray:
    """``scale_from_bits`` of finite amaxes."""
    inverse = np.full_like(amax, 1 / 448)
    first = amax * inverse
    rest = fma(first, np.full_like(amax, -448), amax)
    return fma(rest, inverse, first)


def neighbour(x: np.ndarray, ulps: int) -> np.ndarray:
    return (x.view(np.int32) + np.int32(ulps)).view(f32)


def divisor(amax: np.ndarray, ulps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``divisor`` where the hardware's reciprocal is ``ulps`` away from the correctly rounded."""
    pre = np.where(amax < f32(2**-60), f32(2**64), f32(1))
    s = true_scale(amax) * pre
    r = neighbour(1 / s, ulps)
    one = np.ones_like(s)
    r = np.where(fma(-s, r, one) < 0, neighbour(r, -1), r)
    return pre, r, fma(-s, r, one) * r


def quotient(x: np.ndarray, pre: np.ndarray, r: np.ndarray, e: np.ndarray) -> np.ndarray:
    y = x * pre
    return fma(y, r, y * e)
