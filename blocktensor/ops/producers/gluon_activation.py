"""Compute tiles of words by the PTX of activations, for the Gluon cast kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def tile_of_words(x, y, z, part, DETAIL: gl.constexpr, DTYPE: gl.constexpr):
    """Return the result of ``tile_of_elements``, computed on words."""
    PTX: gl.constexpr = DETAIL[0]
    SECOND: gl.constexpr = DETAIL[1]
    if SECOND is None:
        made = gl.inline_asm_elementwise(PTX, "=r,r,r", [x, y], gl.int32, is_pure=True, pack=1)
    elif part == 0:
        made = gl.inline_asm_elementwise(PTX, "=r,r,r,r", [x, y, z], gl.int32, is_pure=True, pack=1)
    else:
        made = gl.inline_asm_elementwise(SECOND, "=r,r,r", [x, y], gl.int32, is_pure=True, pack=1)
    return made
