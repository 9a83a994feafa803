"""The PTX of activations and norms computes what it should, here and without a GPU.

An interpreter (``tests/support/ptx.py``) runs it on fp32 numbers. The comparison is with float64:
it finds a wrong constant or a wrong step, not a wrong last bit, which GPU tests do.
"""

from __future__ import annotations

from itertools import product
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from blocktensor.ops.producers.activations import ACTIVATIONS, ActivationName
from blocktensor.ops.producers.ptx import Role, word_ptx
from tests.support.numeric import DTYPES, values
from tests.support.ptx import U32, WITH_PTX, run

ROLES: tuple[Role, ...] = get_args(Role)


def expected(activation: ActivationName, role: Role, x: Tensor, d: Tensor, u: Tensor) -> Tensor:
    """The composition of the reference, each step in float64 and rounded to the dtype."""
    act, dtype = ACTIVATIONS[activation], x.dtype
    if role != "gated gradient":
        return act.value(x.double()).to(dtype) * d
    return act.gradient((d * u).double(), x.double()).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "role"), list(product(WITH_PTX, ROLES)))
def test_ptx(activation: ActivationName, role: Role, dtype: torch.dtype, rng: Generator) -> None:
    x, d, u = (3 * values("normal", 8, 4096, dtype, rng) for _ in range(3))
    x[0] *= 20
    x[1] *= 0.01
    x[2, :2048] = 0
    sources = [x, d, u] if role == "gated gradient" else [x, d]
    with np.errstate(all="ignore"):
        words = [s.contiguous().view(-1).view(torch.int32).numpy().view(U32) for s in sources]
        got = run(word_ptx(activation, role, dtype), words, dtype)
    made = torch.from_numpy(got.view(np.int32).copy()).view(dtype).view_as(x)
    want = expected(activation, role, x, d, u)
    # fp32: an error of a few last bits of 1 + tanh, times x and the gradient
    size = x.double().abs().clamp_min(1) * d.double().abs().clamp_min(1)
    if role == "gated gradient":
        size *= u.double().abs().clamp_min(1)
    error = (made.double() - want.double()).abs()
    steps = torch.finfo(dtype).eps
    close = error <= 2 * steps * want.double().abs() + 2e-6 * size
    assert (close | (made == want)).all()  # both may be infinite
    if dtype != torch.float32:
        ordinary = x > -2  # not where 1 + tanh loses bits
        assert (made == want)[ordinary].double().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_give_plus_zero(dtype: torch.dtype) -> None:
    for activation, role in product(WITH_PTX, ROLES):
        words = [np.zeros(4, U32)] * 3
        assert (run(word_ptx(activation, role, dtype), words, dtype) == 0).all()
