"""The shared memory of a program: stages of operands, output buffers, barriers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...runtime.triton_compat import compiler
from .epilogue import CHUNK

NARROW = gl.constexpr(compiler.NARROW)
NEWER_PTXAS = gl.constexpr(compiler.NEWER_PTXAS)


@gluon.jit
def _mark(TEXT: gl.constexpr):
    # a comment in the assembly, for triton_compat/compiler.py
    gl.inline_asm_elementwise(
        TEXT, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def allocate(
    a_map, a_scale_map, b_map, b_scale_map, out, OUT: gl.constexpr, T: gl.constexpr
):  # fmt: skip
    """The stages, with their barriers, and the output buffers; marks kernels for the compiler."""
    E4M3: gl.constexpr = a_map.dtype
    STAGES: gl.constexpr = T.stages
    a_s = gl.allocate_shared_memory(E4M3, [STAGES * (T.m // T.a_rows), T.a_rows, 128], a_map.layout)
    b_s = gl.allocate_shared_memory(E4M3, [STAGES * T.b_places, T.b_place_rows, 128], b_map.layout)
    out_s = ()
    if OUT.tma:
        # Within one allocation, the compiler would put a barrier between any two stores.
        for _ in gl.static_range(T.warpgroups * T.out_buffers(out.dtype.primitive_bitwidth)):
            buffer = gl.allocate_shared_memory(
                out.dtype, [CHUNK, 64] if T.turned else [64, CHUNK], out.layout
            )
            out_s = out_s + (buffer,)
    else:
        out_s = (a_s,)  # not used
    a_scale_s = gl.allocate_shared_memory(gl.float32, [STAGES, T.a_scales], a_scale_map.layout)
    b_scale_s = gl.allocate_shared_memory(
        gl.float32, [STAGES * T.b_scale_copies, T.b_scales], b_scale_map.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=T.warpgroups)
    if T.width == 96:
        _mark(NARROW)
    if T.b_block == 128:
        _mark(NEWER_PTXAS)
    return (a_s, a_scale_s, b_s, b_scale_s, full, empty), out_s
