"""Define the activations of gated MLPs: each once, in torch and in PTX.

CONTRIBUTING.md explains how to add one. Results of the PTX equal torch's CUDA kernels, bit for bit.
nvcc compiles their formulas with the accurate expf, erff and tanhf, IEEE division, subnormal
numbers, and a*b + c in one rounding where nvcc chooses so. The code here was copied from the PTX
that NVRTC 12.9 and 13.0 generate for the same formulas (docs/design/kernels.md). Triton's own
functions flush subnormal numbers to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

aten = torch.ops.aten

ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu2"]
"""The names in ``ACTIVATIONS``; "gelu" is by erf, "relu2" is the square of relu."""

Kind = Literal["value", "value with gradient", "gradient"]
"""The results of PTX; "value with gradient": the value, where shared steps compute the gradient."""


@dataclass(frozen=True)
class Ptx:
    """The PTX of an activation, which ``ptx.word_ptx`` puts into a whole.

    Without branches. Free 32-bit registers are e, q, r, s, t, u, v, w and z, and the predicate p.
    ``mul.rn`` and ``add.rn`` stand for NVRTC's ``mul`` and ``add``, which ptxas would contract.

    Attributes:
        value: computes fp32 y from x; empty if ``of_words`` computes the value.
        gradient: computes y from x and d, the gradient of the value.
        of_bf16: replaces these where x and y are bf16, if there are cheaper steps.
        of_words: steps before these on whole words, each rounded as an op of eager mode: of the
            value, Y from X; of the gradient, D from X and D. ``{words}`` stands for the type of
            words; A is free; ZERO, TWO and MINUS_ZERO are constants.
    """

    value: str
    gradient: str
    of_bf16: Mapping[Kind, str] = field(default_factory=dict)
    of_words: Mapping[Kind, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Activation:
    """An elementwise function as eager mode computes it. It must give +0 for 0.

    Attributes:
        value: computes the activation of the input.
        gradient: computes the gradient of the input from the gradient of the value and the input,
            as autograd does.
        ptx: the same for kernels; None if kernels do not support it, so that torch's ops compute it
            on a GPU too.
        is_cheap: True if computing it again takes less time than keeping its result for a backward.
    """

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    ptx: Ptx | None = None
    is_cheap: bool = False


# e and s of z, where exp(z) = e * s
_EXP = """
fma.rn.f32 u, z, 0f3BBB989D, 0f3F000000; cvt.sat.f32.f32 u, u;
fma.rm.f32 u, u, 0f437C0000, 0f4B400001; add.rn.f32 v, u, 0fCB40007F; neg.f32 v, v;
fma.rn.f32 v, z, 0f3FB8AA3B, v; fma.rn.f32 v, z, 0f32A57060, v;
mov.b32 r, u; shl.b32 r, r, 23; mov.b32 s, r; ex2.approx.ftz.f32 e, v;
"""

# w = sign of z, magnitude of w
_COPY_SIGN = """
mov.b32 r, w; and.b32 r, r, 0x7FFFFFFF; mov.b32 q, z; and.b32 q, q, 0x80000000;
or.b32 r, r, q; mov.b32 w, r;
"""

# w = erf(z)
_ERF = f"""
abs.f32 u, z; setp.ge.f32 p, u, 0f3F8060FE; mul.rn.f32 v, z, z; selp.f32 v, u, v, p;
selp.f32 w, 0f38EB4C3A, 0f38B1E96A, p;
selp.f32 s, 0fBAAE005B, 0fBA574D20, p; fma.rn.f32 w, w, v, s;
selp.f32 s, 0f3C09919F, 0f3BAAD5EA, p; fma.rn.f32 w, w, v, s;
selp.f32 s, 0fBD24D99A, 0fBCDC1BE7, p; fma.rn.f32 w, w, v, s;
selp.f32 s, 0f3E235519, 0f3DE718AF, p; fma.rn.f32 w, w, v, s;
selp.f32 s, 0f3F69B4F9, 0fBEC093AC, p; fma.rn.f32 w, w, v, s;
selp.f32 s, 0f3F210A14, 0f3E0375D3, p; fma.rn.f32 w, w, v, s;
neg.f32 u, u; selp.f32 s, u, z, p; fma.rn.f32 e, w, s, s;
ex2.approx.ftz.f32 w, e; sub.rn.f32 w, 0f3F800000, w; {_COPY_SIGN} selp.f32 w, w, e, p;
"""

# w = tanh(z)
_TANH = f"""
abs.f32 u, z; mul.rn.f32 v, u, 0f4038AA3B; ex2.approx.ftz.f32 v, v; add.rn.f32 v, v, 0f3F800000;
rcp.approx.ftz.f32 v, v; fma.rn.f32 w, v, 0fC0000000, 0f3F800000;
setp.ge.f32 p, u, 0f41102CB4; selp.f32 w, 0f3F800000, w, p; {_COPY_SIGN}
mul.rn.f32 v, z, z; fma.rn.f32 s, 0f3C80F082, v, 0fBD563CAE; fma.rn.f32 s, s, v, 0f3E085941;
fma.rn.f32 s, s, v, 0fBEAAA9ED; fma.rn.f32 s, s, v, 0f00000000; fma.rn.f32 s, s, z, z;
setp.ge.f32 p, u, 0f3F19999A; selp.f32 w, w, s, p;
"""

_TANH_OF_INNER = f"""
mul.rn.f32 t, x, x; mul.rn.f32 z, x, t; fma.rn.f32 z, z, 0f3D372713, x;
mul.rn.f32 z, z, 0f3F4C422A; {_TANH}
"""

# e = d / 4 and r = approximately 4 / d, where d = 1 + exp(-x). IEEE division would branch for huge
# d; a quarter of d has a normal reciprocal as long as d is finite, and r = 0 from there on.
_QUARTER = f"""
neg.f32 z, x; min.NaN.f32 z, z, 0f42B40000; {_EXP} mul.rn.f32 s, s, 0f3E800000;
fma.rn.f32 e, e, s, 0f3E800000; rcp.approx.ftz.f32 r, e;
"""

# Of bf16 x without a branch. Values must be right in bf16 only, so values without a gradient use a
# cheaper exp. A GPU test compares all 65,536 numbers.
_SILU = Ptx(
    value=f"neg.f32 z, x; {_EXP} fma.rn.f32 e, e, s, 0f3F800000; div.rn.f32 y, x, e;",
    gradient=f"neg.f32 z, x; {_EXP} fma.rn.f32 e, e, s, 0f3F800000; rcp.rn.f32 s, e;"
    " mul.rn.f32 y, d, s; sub.rn.f32 u, 0f3F800000, s; fma.rn.f32 u, x, u, 0f3F800000;"
    " mul.rn.f32 y, y, u;",
    of_bf16={
        "value": "mul.rn.f32 z, x, 0fBFB8AA3B; ex2.approx.ftz.f32 e, z;"
        " fma.rn.f32 e, e, 0f3E800000, 0f3E800000; rcp.approx.ftz.f32 r, e;"
        " mul.rn.f32 y, x, 0f3E800000; mul.rn.f32 y, y, r;",
        "value with gradient": f"{_QUARTER} mul.rn.f32 y, x, 0f3E800000; mul.rn.f32 y, y, r;",
        "gradient": f"{_QUARTER} neg.f32 e, e; fma.rn.f32 v, e, r, 0f3F800000;"
        " fma.rn.f32 r, r, v, r; mul.rn.f32 s, r, 0f3E800000;"
        " mul.rn.f32 y, d, s; sub.rn.f32 u, 0f3F800000, s; fma.rn.f32 u, x, u, 0f3F800000;"
        " mul.rn.f32 y, y, u;",
    },
)

_GELU = Ptx(
    value=f"mul.rn.f32 z, x, 0f3F3504F3; {_ERF} add.rn.f32 w, w, 0f3F800000;"
    " mul.rn.f32 y, x, 0f3F000000; mul.rn.f32 y, y, w;",
    gradient=f"mul.rn.f32 z, x, 0f3F3504F3; {_ERF} add.rn.f32 w, w, 0f3F800000;"
    f" mul.rn.f32 z, x, 0fBF000000; mul.rn.f32 z, x, z; {_EXP} mul.rn.f32 e, e, s;"
    " mul.rn.f32 e, e, 0f3ECC422A; mul.rn.f32 e, x, e; fma.rn.f32 w, w, 0f3F000000, e;"
    " mul.rn.f32 y, d, w;",
)

_GELU_TANH = Ptx(
    value=f"{_TANH_OF_INNER} add.rn.f32 w, w, 0f3F800000;"
    " mul.rn.f32 y, x, 0f3F000000; mul.rn.f32 y, y, w;",
    gradient=f"{_TANH_OF_INNER} mul.rn.f32 u, x, 0f3F000000; add.rn.f32 v, w, 0f3F800000;"
    " neg.f32 s, w; fma.rn.f32 s, s, w, 0f3F800000; fma.rn.f32 t, t, 0f3E095D4E, 0f3F800000;"
    " mul.rn.f32 t, t, 0f3F4C422A; mul.rn.f32 u, u, s; mul.rn.f32 u, t, u;"
    " fma.rn.f32 v, v, 0f3F000000, u; mul.rn.f32 y, d, v;",
)

# A = relu(X). The product of the gradient and of 2 A is rounded before the threshold.
_RELU2 = Ptx(
    value="",
    gradient="setp.le.f32 p, x, 0f00000000; selp.f32 y, 0f00000000, d, p;",
    of_words={
        "value": "max.NaN.{words} A, X, ZERO; fma.rn.{words} Y, A, A, MINUS_ZERO;",
        "gradient": "max.NaN.{words} A, X, ZERO; fma.rn.{words} A, A, TWO, MINUS_ZERO;"
        " fma.rn.{words} D, D, A, MINUS_ZERO;",
    },
)


def _relu2_gradient(grad: Tensor, x: Tensor) -> Tensor:
    root = aten.relu(x)
    return aten.threshold_backward(grad * (2 * root), root, 0)


ACTIVATIONS: dict[ActivationName, Activation] = {
    "silu": Activation(aten.silu, aten.silu_backward, _SILU, is_cheap=True),
    "gelu": Activation(aten.gelu, aten.gelu_backward, _GELU),
    "gelu_tanh": Activation(
        lambda x: aten.gelu(x, approximate="tanh"),
        lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
        _GELU_TANH,
    ),
    "relu2": Activation(lambda x: aten.relu(x).square(), _relu2_gradient, _RELU2, is_cheap=True),
}
"""All activations. ``fuse`` tries them in this order."""
