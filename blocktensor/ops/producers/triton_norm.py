"""Normalised rows, weighted: PTX on words of 16-bit or fp32 elements, and tiles made by it.

Every step is rounded as the op of eager mode that computes it. The PTX is that of
``triton_activation.py``: a chain from words to words, where Triton's own ops would hold a tile in
fp32 between two steps.
"""

import triton
import triton.language as tl

_NARROW = {"bf16": "cvt.rn.bf16x2.f32 Y, y1, y0;", "fp16": "cvt.rn.f16x2.f32 Y, y1, y0;"}
_KIND = {"bf16": "bf16x2", "fp16": "f16x2"}
_FACTOR = {"llama": "", "gemma": "add.rn.f32 w, w, 0f3F800000;"}


@triton.constexpr_function
def _widened(source, half, dtype):
    # fp32 of an element of word SOURCE, in the register of that name in small letters
    name = source.lower()
    if dtype == "fp16":
        return f"mov.b32 {{h0, h1}}, {source}; cvt.f32.f16 {name}, h{half};"
    if half:
        return f"and.b32 {name}, {source}, 0xFFFF0000;"
    return f"shl.b32 {name}, {source}, 16;"


@triton.constexpr_function
def norm_ptx(kind, dtype, rows):
    """PTX and constraints of a word of the result, of words x and weight and fp32 1 / rms.

    Args:
        kind: "llama", ``(x * rstd).to(dtype) * weight``, or "gemma", in fp32 by ``1 + weight``.
        dtype: "bf16", "fp16" or "fp32".
        rows: how often 1 / rms comes: once a word, or once an element.
    """
    lines = [
        "{.reg .b16 h0, h1; .reg .b32 X, W, Y, R0, R1, MINUS_ZERO; .reg .b32 x, w, y0, y1;",
        "mov.b32 X, $1; mov.b32 W, $2; mov.b32 R0, $3;",
        f"mov.b32 R1, ${2 + rows};",
    ]
    if dtype == "fp32":
        lines.append(f"mov.b32 w, W; {_FACTOR[kind]} mul.rn.f32 Y, X, R0; mul.rn.f32 Y, Y, w;")
    else:
        for half in range(2):
            lines.append(f"{_widened('X', half, dtype)} mul.rn.f32 y{half}, x, R{half};")
            if kind == "gemma":
                lines.append(
                    f"{_widened('W', half, dtype)} {_FACTOR[kind]} mul.rn.f32 y{half}, y{half}, w;"
                )
        lines.append(_NARROW[dtype])
        if kind == "llama":  # adding -0 keeps the sign of a zero
            lines.append(
                f"mov.b32 MINUS_ZERO, 0x80008000; fma.rn.{_KIND[dtype]} Y, Y, W, MINUS_ZERO;"
            )
    lines.append("mov.b32 $0, Y;}")
    return " ".join(" ".join(lines).split()), "=r" + ",r" * (2 + rows)


@triton.jit
def normalized_elements(x, y, z, part, DETAIL: tl.constexpr, DTYPE: tl.constexpr):
    """A tile of the norm of kind ``DETAIL``, of tiles of x and of the weight, and 1 / rms."""
    ROWS: tl.constexpr = 1 if DTYPE == tl.float32 else 2
    PTX: tl.constexpr = norm_ptx(DETAIL, DTYPE.name, ROWS)
    BITS: tl.constexpr = tl.int32 if DTYPE == tl.float32 else tl.int16
    x = x.to(BITS, bitcast=True)
    y = y.to(BITS, bitcast=True)
    z = z.to(tl.int32, bitcast=True)
    made = tl.inline_asm_elementwise(PTX[0], PTX[1], [x, y, z], x.dtype, is_pure=True, pack=ROWS)
    return made.to(DTYPE, bitcast=True)
