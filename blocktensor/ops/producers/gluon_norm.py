"""Tiles of words of normalised rows, for Gluon's cast kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .triton_norm import norm_ptx


@gluon.jit
def normalized_words(x, y, z, part, DETAIL: gl.constexpr, DTYPE: gl.constexpr):
    """``normalized_elements``, of words."""
    PTX: gl.constexpr = norm_ptx(DETAIL, DTYPE.name, 1)
    return gl.inline_asm_elementwise(PTX[0], PTX[1], [x, y, z], gl.int32, is_pure=True, pack=1)
