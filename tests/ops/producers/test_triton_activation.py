"""The PTX of activations and norms computes what it should, here and without a GPU.

An interpreter (``tests/support/ptx.py``) runs it on fp32 numbers. The comparison is with
float64: it finds a wrong constant or a wrong step, not a wrong last bit, which GPU tests do.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blocktensor.ops.norm.reference import normalize
from blocktensor.ops.producers.reference import ACTIVATIONS
from tests.support.numeric import DTYPES, assert_same, values
from tests.support.ptx import NAMES, U32, as_words, run

pytest.importorskip("triton")

from blocktensor.ops.producers.triton_activation import norm_ptx, word_ptx

NORMS = ("llama", "gemma")
ROLES = ("value", "gated", "gated beside", "gradient", "gated gradient")


def expected(activation: str, role: str, x: Tensor, d: Tensor, u: Tensor) -> Tensor:
    """The composition of the reference, each step in float64 and rounded to the dtype."""
    act, dtype = ACTIVATIONS[activation], x.dtype
    if not role.endswith("gradient"):
        value = act.value(x.double()).to(dtype)
        return value if role == "value" else value * d
    return act.gradient((d * u if role == "gated gradient" else d).double(), x.double()).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "role"), list(product(ACTIVATIONS, ROLES)))
def test_ptx(activation: str, role: str, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    x, d, u = (3 * values("normal", 8, 4096, dtype, rng) for _ in range(3))
    x[0] *= 20
    x[1] *= 0.01
    x[2, :2048] = 0
    ptx, constraints = word_ptx(activation, role, NAMES[dtype])
    sources = [x, d, u][: constraints.count(",")]
    with np.errstate(all="ignore"):
        got = run(ptx, [as_words(s) for s in sources], dtype)
    made = torch.from_numpy(got.view(np.int32).copy()).view(dtype).view_as(x)
    want = expected(activation, role, x, d, u)
    # fp32: an error of a few last bits of 1 + erf or 1 + tanh, times x and the gradient
    size = x.double().abs().clamp_min(1) * d.double().abs().clamp_min(1)
    if role == "gated gradient":
        size *= u.double().abs().clamp_min(1)
    error = (made.double() - want.double()).abs()
    steps = torch.finfo(dtype).eps
    close = error <= 2 * steps * want.double().abs() + 2e-6 * size
    assert (close | (made == want)).all()  # both may be infinite
    if dtype != torch.float32:
        ordinary = x > -2  # not where 1 + erf or 1 + tanh loses bits
        assert (made == want)[ordinary].double().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("of", ["normal", "edges", "tiny", "zeros"])
def test_ptx_of_norms(of: str, kind: Any, dtype: torch.dtype) -> None:
    """Every step is one multiplication or addition, which the interpreter rounds as a GPU does."""
    rng = torch.Generator().manual_seed(0)
    x = values(of, 64, 512, dtype, rng)
    weight = values("normal", 1, 512, dtype, rng)[0]
    rstd = torch.rand((64, 1), generator=rng) * 3
    want = normalize(x, rstd, weight, kind)
    per_word = 4 // dtype.itemsize
    words = as_words(x), as_words(weight.expand(x.shape).contiguous())
    by_element = rstd.expand(x.shape)
    with np.errstate(all="ignore"):
        ptx, constraints = norm_ptx(kind, NAMES[dtype], 1)
        once = run(ptx, [*words, as_words(by_element[:, ::per_word])], dtype)
        assert constraints.count("r") == 4
        ptx, constraints = norm_ptx(kind, NAMES[dtype], per_word)
        each = [as_words(by_element[:, i::per_word]) for i in range(per_word)]
        twice = run(ptx, [*words, *each], dtype)
        assert constraints.count("r") == 3 + per_word
    for made in (once, twice):
        got = torch.from_numpy(made.view(np.int32).copy()).view(dtype).view_as(x)
        assert_same(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_give_plus_zero(dtype: torch.dtype) -> None:
    """A columnwise cast ends in zeros, which come from nothing in memory."""
    ptxs = [word_ptx(*which, NAMES[dtype]) for which in product(ACTIVATIONS, ROLES)]
    for ptx, constraints in (*ptxs, *(norm_ptx(kind, NAMES[dtype], 1) for kind in NORMS)):
        words = [np.zeros(4, U32)] * constraints.count(",")
        assert (run(ptx, words, dtype) == 0).all()
