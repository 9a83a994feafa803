"""An interpreter of the few PTX instructions that kernels use, on fp32 numbers.

It rounds every step as the instruction says, but for approximate ones, which are exact here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from blocktensor.ops.producers.activations import ACTIVATIONS
from tests.support.numeric import DTYPES, e4m3_bytes

F32, U32 = np.float32, np.uint32
NAMES = dict(zip(DTYPES, ("bf16", "fp16", "fp32"), strict=True))
"""How the PTX calls a dtype."""

WITH_PTX = [name for name, activation in ACTIVATIONS.items() if activation.ptx is not None]
"""The activations that kernels support."""


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
    "rsqrt.approx.f32": lambda a: 1 / np.sqrt(a),
    "ex2.approx.ftz.f32": np.exp2,
    "cvt.sat.f32.f32": lambda a: np.clip(np.nan_to_num(a, nan=0.0), 0, 1),
    "neg.f32": np.negative,
    "abs.f32": np.abs,
    "max.NaN.f32": np.maximum,
    "min.NaN.f32": np.minimum,
}
PAIRS: dict[str, Callable[..., Any]] = {
    "fma.rn": FLOATS["fma.rn.f32"],
    "mul.rn": FLOATS["mul.rn.f32"],
    "max.NaN": np.maximum,
}
"""Of both halves of a word."""
WORDS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "max.u16x2": lambda a, b: (
        np.maximum(a & 0xFFFF, b & 0xFFFF) | np.maximum(a >> 16, b >> 16) << 16
    ),
    "prmt.b32": lambda a, b, selector: permuted(a, b, int(selector.flat[0])),
    "cvt.rn.f16x2.e4m3x2": lambda a: of_e4m3(a),
    "cvt.rn.satfinite.e4m3x2.f16x2": lambda a: to_e4m3(*halves(a, torch.float16)),
    "cvt.rn.satfinite.e4m3x2.f32": lambda high, low: to_e4m3(wide(low), wide(high)),
}


def permuted(a: Any, b: Any, selector: int) -> Any:
    """Four of the eight bytes of two words; hexadecimal digits of the selector choose them."""
    both = np.stack([a, b], 1).astype(U32).view(np.uint8)
    return np.stack([both[:, selector >> 4 * i & 7] for i in range(4)], 1).view(U32)[:, 0]


def of_e4m3(a: Any) -> Any:
    """Two numbers of 8 bits, as two numbers of 16 bits."""
    given = torch.from_numpy(a.astype(np.uint16).view(np.uint8)).view(torch.float8_e4m3fn)
    return given.half().view(torch.int32).numpy().view(U32)


def to_e4m3(low: Any, high: Any) -> Any:
    """Two numbers, rounded to 8 bits."""
    return e4m3_bytes(low).astype(U32) | e4m3_bytes(high).astype(U32) << 8


def toward_minus_infinity(x: Any) -> Any:
    near = x.astype(F32)
    return bits(np.where(near.astype(np.float64) > x, np.nextafter(near, F32(-np.inf)), near))


def result(op: str, operands: list[Any], dtype: torch.dtype) -> Any:
    """What an instruction computes from words and numbers."""
    if op in WORDS:
        return WORDS[op](*operands)
    if op == "cvt.f32.f16":
        return rounded(operands[0])
    if op == "selp.f32":
        return np.where(operands[2], *operands[:2])
    name, _, kind = op.rpartition(".")
    if name in PAIRS and kind == f"{NAMES[dtype].replace('fp16', 'f16')}x2":
        pairs = zip(*(halves(x, dtype) for x in operands), strict=True)
        low, high = (PAIRS[name](*pair) for pair in pairs)
        return word(low, high, dtype)
    numbers = [wide(x) for x in operands]
    if op in FLOATS:
        return rounded(FLOATS[op](*numbers))
    if op == "setp.ge.f32":
        return numbers[0] >= numbers[1]
    if op == "setp.le.f32":
        return numbers[0] <= numbers[1]
    if op == "fma.rm.f32":
        a, b, c = numbers
        return toward_minus_infinity(a * b + c)
    is_known = op.startswith("cvt.rn.") and op.endswith("x2.f32")
    assert is_known, f"{op}: say in {__file__} what it computes"
    high, low = numbers
    return word(low, high, dtype)


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
        if op == "mov.b32" and rest.strip().endswith("}"):  # two halves, bits, into a word
            registers[out] = registers[names[0]] | registers[names[1]] << 16
        elif op == "mov.b32" and len(names) == 2:  # a word into two halves
            given = registers[names.pop()]
            is_read_as_bits = "e4m3x2" in ptx
            low_high = [given & 0xFFFF, given >> 16] if is_read_as_bits else halves(given, dtype)
            registers |= dict(zip((out, names[0]), low_high, strict=True))
        else:
            registers[out] = result(op, [operand(name) for name in names], dtype)
    return registers["$0"]
