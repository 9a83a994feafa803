"""Compute tiles of words by the PTX of activations, for the Gluon cast kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .triton_activation import word_ptx


@gluon.jit
def _words(x, y, z, ACTIVATION: gl.constexpr, ROLE: gl.constexpr, DTYPE: gl.constexpr):
    PTX: gl.constexpr = word_ptx(ACTIVATION, ROLE, DTYPE.name)
    if ROLE == "gated gradient":
        return gl.inline_asm_elementwise(PTX[0], PTX[1], [x, y, z], gl.int32, is_pure=True, pack=1)
    else:
        return gl.inline_asm_elementwise(PTX[0], PTX[1], [x, y], gl.int32, is_pure=True, pack=1)


@gluon.jit
def tile_of_words(x, y, z, part, DETAIL: gl.constexpr, DTYPE: gl.constexpr):
    """Return the result of ``tile_of_elements``, computed on words."""
    ACTIVATION: gl.constexpr = DETAIL[0]
    ROLE: gl.constexpr = DETAIL[1]
    if ROLE == "gated gradient":
        if part == 0:
            made = _words(x, y, z, ACTIVATION, ROLE, DTYPE)
        else:
            made = _words(x, y, z, ACTIVATION, "gated beside", DTYPE)
        return made
    else:
        return _words(x, y, z, ACTIVATION, ROLE, DTYPE)
