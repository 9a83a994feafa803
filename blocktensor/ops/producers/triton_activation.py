"""Compute tiles of elements by the PTX of activations, for the Triton cast kernel."""

import triton
import triton.language as tl


@triton.jit
def _words(x, y, z, PTX: tl.constexpr, SOURCES: tl.constexpr, DTYPE: tl.constexpr):
    BITS: tl.constexpr = tl.int32 if DTYPE == tl.float32 else tl.int16
    PACK: tl.constexpr = 1 if DTYPE == tl.float32 else 2
    x = x.to(BITS, bitcast=True)
    y = y.to(BITS, bitcast=True)
    if SOURCES == 3:
        z = z.to(BITS, bitcast=True)
        made = tl.inline_asm_elementwise(
            PTX, "=r,r,r,r", [x, y, z], x.dtype, is_pure=True, pack=PACK
        )
    else:
        made = tl.inline_asm_elementwise(PTX, "=r,r,r", [x, y], x.dtype, is_pure=True, pack=PACK)
    return made.to(DTYPE, bitcast=True)


@triton.jit
def tile_of_elements(x, y, z, part, DETAIL: tl.constexpr, DTYPE: tl.constexpr):
    """Compute a tile by the PTX of ``ptx.word_ptx``.

    ``DETAIL``: of a value, PTX that reads x and y, and None. Of gradients, PTX of part 0, which
    reads x, y and z, and PTX of part 1, which reads x and y.
    """
    PTX: tl.constexpr = DETAIL[0]
    SECOND: tl.constexpr = DETAIL[1]
    if SECOND is None:
        return _words(x, y, z, PTX, 2, DTYPE)
    else:
        if part == 0:
            made = _words(x, y, z, PTX, 3, DTYPE)
        else:
            made = _words(x, y, z, SECOND, 2, DTYPE)
        return made
