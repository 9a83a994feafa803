"""Provide functions of Gluon under their newest names, for every supported Triton."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.6 and 3.7: async_copy_...; 3.8: both; 3.9: async_load and async_store.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# Triton 3.6 to 3.8: _reinterpret; 3.9: reinterpret. A method; here, a function.
_REINTERPRET = (
    "reinterpret" if hasattr(gl.shared_memory_descriptor, "reinterpret") else "_reinterpret"
)


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """View shared memory with another dtype, shape and layout of the same size."""
    return getattr(memory, _REINTERPRET)(dtype, shape, layout, _semantic=_semantic)
