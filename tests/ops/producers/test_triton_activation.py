"""The PTX of activations and norms computes what it should, here and without a GPU.

An interpreter runs it on fp32 numbers. The comparison is with float64: it finds a wrong constant or
a wrong step, not a wrong last bit, which GPU tests do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from blocktensor.ops.producers.reference import ACTIVATIONS
from tests.support.numeric import DTYPES, values

pytest.importorskip("triton")

from blocktensor.ops.producers.triton_activation import word_ptx

# An interpreter of the few PTX instructions that producers use, on fp32 numbers

F32, U32 = np.float32, np.uint32
NAMES = dict(zip(DTYPES, ("bf16", "fp16", "fp32"), strict=True))
"""How the PTX calls a dtype."""


def bits(x: Any) -> Any:
    return np.asarray(x, F32).view(U32)


def rounded(x: Any) -> Any:
    return bits(x.astype(F32))


def wide(x: Any) -> Any:
    return np.asarray(x, U32).view(F32).astype(np.float64)


def halves(words: Any, dtype: torch.dtype) -> list[Any]:
    made = torch.from_numpy(words.view(np.int32).copy()).view(dtype).double().numpy()
    return [made[0::2], made[1::2]]


def word(low: Any, high: Any, dtype: torch.dtype) -> Any:
    pair = torch.from_numpy(np.stack([low, high], 1).astype(F32))  # exact, or rounded once
    return pair.to(dtype).view(torch.int32).numpy().view(U32)[:, 0]


FLOATS: dict[str, Callable[..., Any]] = {
    "fma.rn.f32": lambda a, b, c: a * b + c,
    "add.rn.f32": lambda a, b: a + b,
    "sub.rn.f32": lambda a, b: a - b,
    "mul.rn.f32": lambda a, b: a * b,
    "div.rn.f32": lambda a, b: a / b,
    "rcp.rn.f32": lambda a: 1 / a,
    "rcp.approx.ftz.f32": lambda a: 1 / a,
    "ex2.approx.ftz.f32": np.exp2,
    "cvt.sat.f32.f32": lambda a: np.clip(np.nan_to_num(a, nan=0.0), 0, 1),
    "neg.f32": np.negative,
    "abs.f32": np.abs,
    "min.NaN.f32": np.minimum,
}
WORDS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
}


def toward_minus_infinity(x: Any) -> Any:
    near = x.astype(F32)
    return bits(np.where(near.astype(np.float64) > x, np.nextafter(near, F32(-np.inf)), near))


def run(ptx: str, words: list[Any], dtype: torch.dtype) -> Any:
    """Word $0 of ``ptx``, given the words $1, $2, ..."""
    registers: dict[str, Any] = {f"${i + 1}": x for i, x in enumerate(words)}

    def operand(name: str) -> Any:
        if name in registers:
            return registers[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full_like(words[0], number)

    for line in ptx.strip("{}").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        op, rest = line.split(None, 1)
        out, *names = [name.strip() for name in re.sub(r"[{}]", "", rest).split(",")]
        if op == "mov.b32" and len(names) == 2:  # a word into two halves
            low_high = halves(registers[names.pop()], dtype)
            registers |= dict(zip((out, names[0]), low_high, strict=True))
        elif op == "cvt.f32.f16":
            registers[out] = rounded(registers[names[0]])
        elif op.startswith("cvt.rn."):
            registers[out] = word(wide(operand(names[1])), wide(operand(names[0])), dtype)
        elif op == "selp.f32":
            registers[out] = np.where(registers[names[2]], *map(operand, names[:2]))
        elif op == "setp.ge.f32":
            a, b = (wide(operand(name)) for name in names)
            registers[out] = a >= b
        elif op == "fma.rm.f32":
            a, b, c = (wide(operand(name)) for name in names)
            registers[out] = toward_minus_infinity(a * b + c)
        elif op in FLOATS:
            registers[out] = rounded(FLOATS[op](*(wide(operand(name)) for name in names)))
        elif op in WORDS:
            registers[out] = WORDS[op](*(operand(name) for name in names))
        else:  # of both halves
            assert op == {"bf16": "fma.rn.bf16x2", "fp16": "fma.rn.f16x2"}[NAMES[dtype]]
            pairs = zip(*(halves(operand(name), dtype) for name in names), strict=True)
            low, high = (a * b + c for a, b, c in pairs)
            registers[out] = word(low, high, dtype)
    return registers["$0"]


ROLES = ("gated", "gated beside", "gated gradient")


def expected(activation: str, role: str, x: Tensor, d: Tensor, u: Tensor) -> Tensor:
    """The composition of the reference, each step in float64 and rounded to the dtype."""
    act, dtype = ACTIVATIONS[activation], x.dtype
    if role != "gated gradient":
        return act.value(x.double()).to(dtype) * d
    return act.gradient((d * u).double(), x.double()).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "role"), list(product(ACTIVATIONS, ROLES)))
def test_ptx(activation: str, role: str, dtype: torch.dtype, rng: Generator) -> None:
    x, d, u = (3 * values("normal", 8, 4096, dtype, rng) for _ in range(3))
    x[0] *= 20
    x[1] *= 0.01
    x[2, :2048] = 0
    ptx, constraints = word_ptx(activation, role, NAMES[dtype])
    sources = [x, d, u][: constraints.count(",")]
    with np.errstate(all="ignore"):
        words = [s.contiguous().view(-1).view(torch.int32).numpy().view(U32) for s in sources]
        got = run(ptx, words, dtype)
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
    ptxs = [word_ptx(*which, NAMES[dtype]) for which in product(ACTIVATIONS, ROLES)]
    for ptx, constraints in ptxs:
        words = [np.zeros(4, U32)] * constraints.count(",")
        assert (run(ptx, words, dtype) == 0).all()
