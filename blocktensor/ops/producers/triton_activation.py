"""Compute activations and their gradients by PTX, on words of 16-bit or fp32 elements, or on tiles.

Results equal torch's CUDA kernels, bit for bit. nvcc compiles their formulas with the accurate
expf, erff and tanhf, IEEE division, subnormal numbers, and a*b + c in one rounding where nvcc
chooses so. The code here was copied from the PTX that NVRTC 12.9 and 13.0 generate for the same
formulas. Triton's own functions flush subnormal numbers to zero. Also, PTX keeps all steps of one
element together, as in ``cast/gluon_words.py``.

Each piece of PTX computes y from x; for a gradient, y from x and d, the gradient of the activation.
"""

import triton
import triton.language as tl

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

_VALUES = {
    "silu": f"neg.f32 z, x; {_EXP} fma.rn.f32 e, e, s, 0f3F800000; div.rn.f32 y, x, e;",
    "gelu": f"mul.rn.f32 z, x, 0f3F3504F3; {_ERF} add.rn.f32 w, w, 0f3F800000;"
    " mul.rn.f32 y, x, 0f3F000000; mul.rn.f32 y, y, w;",
    "gelu_tanh": f"{_TANH_OF_INNER} add.rn.f32 w, w, 0f3F800000;"
    " mul.rn.f32 y, x, 0f3F000000; mul.rn.f32 y, y, w;",
}

_GRADIENTS = {
    "silu": f"neg.f32 z, x; {_EXP} fma.rn.f32 e, e, s, 0f3F800000; rcp.rn.f32 s, e;"
    " mul.rn.f32 y, d, s; sub.rn.f32 u, 0f3F800000, s; fma.rn.f32 u, x, u, 0f3F800000;"
    " mul.rn.f32 y, y, u;",
    "gelu": f"mul.rn.f32 z, x, 0f3F3504F3; {_ERF} add.rn.f32 w, w, 0f3F800000;"
    f" mul.rn.f32 z, x, 0fBF000000; mul.rn.f32 z, x, z; {_EXP} mul.rn.f32 e, e, s;"
    " mul.rn.f32 e, e, 0f3ECC422A; mul.rn.f32 e, x, e; fma.rn.f32 w, w, 0f3F000000, e;"
    " mul.rn.f32 y, d, w;",
    "gelu_tanh": f"{_TANH_OF_INNER} mul.rn.f32 u, x, 0f3F000000; add.rn.f32 v, w, 0f3F800000;"
    " neg.f32 s, w; fma.rn.f32 s, s, w, 0f3F800000; fma.rn.f32 t, t, 0f3E095D4E, 0f3F800000;"
    " mul.rn.f32 t, t, 0f3F4C422A; mul.rn.f32 u, u, s; mul.rn.f32 u, t, u;"
    " fma.rn.f32 v, v, 0f3F000000, u; mul.rn.f32 y, d, v;",
    # d is already the gradient of the square, see word_ptx
    "relu2": "setp.le.f32 p, x, 0f00000000; selp.f32 y, 0f00000000, d, p;",
}


# e = d / 4 and r = approximately 4 / d, where d = 1 + exp(-x). IEEE division would branch for huge
# d; a quarter of d has a normal reciprocal as long as d is finite, and r = 0 from there on.
_QUARTER = f"neg.f32 z, x; min.NaN.f32 z, z, 0f42B40000; {_EXP} mul.rn.f32 s, s, 0f3E800000;"
_QUARTER += " fma.rn.f32 e, e, s, 0f3E800000; rcp.approx.ftz.f32 r, e;"

# For bf16 x, without a branch. Values must be right in bf16 only, so values without a gradient use
# a cheaper exp. A GPU test compares all 65,536 numbers.
_OF_BF16 = {
    ("silu", "value"): "mul.rn.f32 z, x, 0fBFB8AA3B; ex2.approx.ftz.f32 e, z;"
    " fma.rn.f32 e, e, 0f3E800000, 0f3E800000; rcp.approx.ftz.f32 r, e;"
    " mul.rn.f32 y, x, 0f3E800000; mul.rn.f32 y, y, r;",
    ("silu", "value beside"): f"{_QUARTER} mul.rn.f32 y, x, 0f3E800000; mul.rn.f32 y, y, r;",
    ("silu", "gradient"): f"{_QUARTER} neg.f32 e, e; fma.rn.f32 v, e, r, 0f3F800000;"
    " fma.rn.f32 r, r, v, r; mul.rn.f32 s, r, 0f3E800000;"
    " mul.rn.f32 y, d, s; sub.rn.f32 u, 0f3F800000, s; fma.rn.f32 u, x, u, 0f3F800000;"
    " mul.rn.f32 y, y, u;",
}


@triton.constexpr_function
def element_ptx(activation, kind, dtype):
    """Return the PTX that computes y from x, or the gradient y from x and d, in 32-bit registers.

    Args:
        activation: a name in ``reference.ACTIVATIONS``.
        kind: "value", "gradient", or "value beside": a value computed with a gradient, whose steps
            it shares.
        dtype: the dtype of x and y in memory.
    """
    if dtype == "bf16" and (activation, kind) in _OF_BF16:
        return _OF_BF16[activation, kind]
    return (_GRADIENTS if kind == "gradient" else _VALUES)[activation]


@triton.constexpr_function
def _by_element(dtype, ptx, gradient):
    # Computes word Y from word X and, for a gradient, word D
    sources = ("x", "d") if gradient else ("x",)
    if dtype == "fp32":
        return " ".join(f"mov.b32 {x}, {x.upper()};" for x in sources) + f" {ptx} mov.b32 Y, y;"
    lines = []
    for half in range(2):
        for x in sources:
            if dtype == "fp16":
                lines.append(f"mov.b32 {{h0, h1}}, {x.upper()}; cvt.f32.f16 {x}, h{half};")
            elif half:
                lines.append(f"and.b32 {x}, {x.upper()}, 0xFFFF0000;")
            else:
                lines.append(f"shl.b32 {x}, {x.upper()}, 16;")
        lines.append(f"{ptx} mov.b32 y{half}, y;")
    kind = {"bf16": "bf16x2", "fp16": "f16x2"}[dtype]
    return " ".join(lines) + f" cvt.rn.{kind}.f32 Y, y1, y0;"


@triton.constexpr_function
def word_ptx(activation, role, dtype):
    """Return PTX and constraints for the words that a producer computes.

    Args:
        activation: a name in ``reference.ACTIVATIONS``.
        role: "gated": the value times y, from (x, y); "gated beside": the same if a gradient is
            also computed; "gated gradient": the gradient of x from the gradient of the value, y
            times z, from (x, y, z).
        dtype: "bf16", "fp16" or "fp32", to which every step of eager mode is rounded.
    """
    words = {"bf16": "bf16x2", "fp16": "f16x2", "fp32": "f32"}[dtype]
    is_wide = dtype == "fp32"
    minus_zero, two = ("0x80000000", "0x40000000") if is_wide else ("0x80008000", "0x40004000")

    def times(out, a, b):  # adding -0 keeps the sign of a zero
        return f"fma.rn.{words} {out}, {a}, {b}, MINUS_ZERO;"

    gradient = role == "gated gradient"
    kind = "gradient" if gradient else "value beside" if role == "gated beside" else "value"
    sources = "XDU" if gradient else "XU"
    lines = [
        "{.reg .pred p; .reg .b16 h0, h1; .reg .b32 X, D, U, Y, A, CONSTANT, MINUS_ZERO;",
        ".reg .b32 x, y, d, e, q, r, s, t, u, v, w, z, y0, y1;",
        f"mov.b32 MINUS_ZERO, {minus_zero};",
        *(f"mov.b32 {name}, ${i + 1};" for i, name in enumerate(sources)),
    ]
    if gradient:
        lines.append(times("D", "D", "U"))
    if activation == "relu2":  # A = relu(X); squares and doubles are rounded as other products
        lines.append(f"mov.b32 CONSTANT, 0; max.NaN.{words} A, X, CONSTANT;")
        if gradient:
            lines.append(f"mov.b32 CONSTANT, {two};")
            lines += [times("A", "A", "CONSTANT"), times("D", "D", "A")]
        else:
            lines.append(times("Y", "A", "A"))
    if gradient or activation != "relu2":
        lines.append(_by_element(dtype, element_ptx(activation, kind, dtype), gradient))
    if not gradient:
        lines.append(times("Y", "Y", "U"))
    lines.append("mov.b32 $0, Y;}")
    return " ".join(" ".join(lines).split()), "=r" + ",r" * len(sources)


@triton.jit
def _elements(x, y, z, ACTIVATION: tl.constexpr, ROLE: tl.constexpr, DTYPE: tl.constexpr):
    PTX: tl.constexpr = word_ptx(ACTIVATION, ROLE, DTYPE.name)
    BITS: tl.constexpr = tl.int32 if DTYPE == tl.float32 else tl.int16
    PACK: tl.constexpr = 1 if DTYPE == tl.float32 else 2
    x = x.to(BITS, bitcast=True)
    y = y.to(BITS, bitcast=True)
    if ROLE == "gated gradient":
        z = z.to(BITS, bitcast=True)
        made = tl.inline_asm_elementwise(
            PTX[0], PTX[1], [x, y, z], x.dtype, is_pure=True, pack=PACK
        )
    else:
        made = tl.inline_asm_elementwise(PTX[0], PTX[1], [x, y], x.dtype, is_pure=True, pack=PACK)
    return made.to(DTYPE, bitcast=True)


@triton.jit
def tile_of_elements(x, y, z, part, DETAIL: tl.constexpr, DTYPE: tl.constexpr):
    """Apply ``word_ptx`` to tiles; part 1 of a gated gradient is the gradient of up.

    ``DETAIL``: the activation and the role.
    """
    ACTIVATION: tl.constexpr = DETAIL[0]
    ROLE: tl.constexpr = DETAIL[1]
    if ROLE == "gated gradient":
        if part == 0:
            made = _elements(x, y, z, ACTIVATION, ROLE, DTYPE)
        else:
            made = _elements(x, y, z, ACTIVATION, "gated beside", DTYPE)
        return made
    else:
        return _elements(x, y, z, ACTIVATION, ROLE, DTYPE)
