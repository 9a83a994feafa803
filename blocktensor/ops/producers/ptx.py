"""Compose the PTX that computes words of gated activations, of 16-bit or fp32 elements.

PTX keeps all steps of one element together, as in ``cast/gluon_words.py``. Kernels get the text as
a constant: it is a part of their key in Triton's cache, so that no kernel of an older text runs.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

from .activations import ACTIVATIONS, ActivationName, Kind, Ptx

Role = Literal["gated", "gated with gradient", "gated gradient"]

_KINDS: dict[Role, Kind] = {
    "gated": "value",
    "gated with gradient": "value with gradient",
    "gated gradient": "gradient",
}


@functools.cache
def word_ptx(activation: ActivationName, role: Role, dtype: torch.dtype) -> str:
    """Return PTX that computes $0 from the words $1, $2 and, of a gradient, $3.

    Args:
        activation: one that has PTX.
        role: "gated": the value times y, from (x, y); "gated with gradient": the same if a gradient
            is also computed; "gated gradient": the gradient of x from the gradient of the value, y
            times z, from (x, y, z).
        dtype: bf16, fp16 or fp32, to which every step of eager mode is rounded.
    """
    ptx, kind = ACTIVATIONS[activation].ptx, _KINDS[role]
    assert ptx is not None
    words = {torch.bfloat16: "bf16x2", torch.float16: "f16x2", torch.float32: "f32"}[dtype]
    is_wide = dtype == torch.float32
    minus_zero, two = ("0x80000000", "0x40000000") if is_wide else ("0x80008000", "0x40004000")
    is_gradient = kind == "gradient"
    sources = "XDU" if is_gradient else "XU"
    lines = [
        "{.reg .pred p; .reg .b16 h0, h1; .reg .b32 X, D, U, Y, A, ZERO, TWO, MINUS_ZERO;",
        ".reg .b32 x, y, d, e, q, r, s, t, u, v, w, z, y0, y1;",
        f"mov.b32 ZERO, 0; mov.b32 TWO, {two}; mov.b32 MINUS_ZERO, {minus_zero};",
        *(f"mov.b32 {name}, ${i + 1};" for i, name in enumerate(sources)),
    ]
    # adding -0 keeps the sign of a zero
    if is_gradient:
        lines.append(f"fma.rn.{words} D, D, U, MINUS_ZERO;")
    lines.append(ptx.of_words.get("gradient" if is_gradient else "value", "").format(words=words))
    if element := _element_ptx(ptx, kind, dtype):
        lines.append(_by_element(dtype, element, is_gradient))
    if not is_gradient:
        lines.append(f"fma.rn.{words} Y, Y, U, MINUS_ZERO;")
    lines.append("mov.b32 $0, Y;}")
    return " ".join(" ".join(lines).split())


def _element_ptx(ptx: Ptx, kind: Kind, dtype: torch.dtype) -> str:
    """Return the PTX that computes y from x, or the gradient y from x and d, in fp32 registers."""
    if dtype == torch.bfloat16 and kind in ptx.of_bf16:
        return ptx.of_bf16[kind]
    return ptx.gradient if kind == "gradient" else ptx.value


def _by_element(dtype: torch.dtype, ptx: str, is_gradient: bool) -> str:
    """Compute word Y from word X and, for a gradient, word D."""
    sources = ("x", "d") if is_gradient else ("x",)
    if dtype == torch.float32:
        return " ".join(f"mov.b32 {x}, {x.upper()};" for x in sources) + f" {ptx} mov.b32 Y, y;"
    lines = []
    for half in range(2):
        for x in sources:
            if dtype == torch.float16:
                lines.append(f"mov.b32 {{h0, h1}}, {x.upper()}; cvt.f32.f16 {x}, h{half};")
            elif half:
                lines.append(f"and.b32 {x}, {x.upper()}, 0xFFFF0000;")
            else:
                lines.append(f"shl.b32 {x}, {x.upper()}, 16;")
        lines.append(f"{ptx} mov.b32 y{half}, y;")
    kind = "bf16x2" if dtype == torch.bfloat16 else "f16x2"
    return " ".join(lines) + f" cvt.rn.{kind}.f32 Y, y1, y0;"
