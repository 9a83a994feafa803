"""Byte transpose of 128x128 casts whose rows are whole words of 4 bytes."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..formats import Quantized
from ..runtime.launch import Launch
from .gluon_stack import block_of_program, stack_of
from .gluon_words import patch_layouts
from .triton_transpose import transpose_by

_WARPS = 8


@gluon.jit
def _bytes_by_column(words):
    # Transposes 4x4 bytes: from 4 rows of 4 bytes, one word for each of the 4 columns.
    return gl.inline_asm_elementwise(
        "{.reg .b32 a, b, c, d;"
        "prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140;"
        "prmt.b32 c, $4, $5, 0x7362; prmt.b32 d, $6, $7, 0x7362;"
        "prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632;"
        "prmt.b32 $2, c, d, 0x5410; prmt.b32 $3, c, d, 0x7632;}",
        "=&r,=&r,=&r,=&r,r,r,r,r", [words], dtype=(gl.int8, gl.int8, gl.int8, gl.int8),
        is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "rows", "cols", "stride_e", "stride_n", "scale_stride_e", "blocks_n", "blocks_k",
        "in_scale_ld", "out_scale_ld",
    ]
)  # fmt: skip
def transpose_128x128_kernel(
    data_ptr, scale_ptr, out_ptr, out_scale_ptr, rows, cols, stride_e, stride_n, scale_stride_e,
    blocks_n, blocks_k, in_scale_ld, out_scale_ld, UNIT_N: gl.constexpr, UNIT_K: gl.constexpr,
):  # fmt: skip
    # One program transposes a 128x128 block of bytes and copies its scale: 4x4 bytes in registers,
    # then words of 4 rows change threads, so that whole lines are read and written. Sizes and
    # strides are in units of UNIT_N rows and UNIT_K words, as in gluon_columnwise.py.
    LAYOUTS: gl.constexpr = patch_layouts(gl.int8, 4, 4, gl.num_warps())
    BY_ROW: gl.constexpr = LAYOUTS[0]
    BY_COLUMN: gl.constexpr = LAYOUTS[1]
    LINES: gl.constexpr = gl.BlockedLayout([16, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    rows = rows * UNIT_N
    words = cols * UNIT_K
    stride = stride_n * UNIT_K
    matrix, block_n, block_k = block_of_program(blocks_n, blocks_k)
    first_n = block_n.to(gl.int64) * 128
    first_k = block_k.to(gl.int64) * 128
    rows_left = rows - block_n * 128
    words_left = words - block_k * 32

    n = gl.arange(0, 128, layout=gl.SliceLayout(1, BY_ROW))[:, None]
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, BY_ROW))[None, :]
    source = data_ptr.to(gl.pointer_type(gl.int32)) + matrix * stride_e * UNIT_K
    source += first_n * stride + block_k * 32
    inside = (n < rows_left) & (word < words_left)
    tile = gl.load(source + (n * stride + word), mask=inside, other=0)
    scale = gl.load(scale_ptr + matrix * scale_stride_e + block_n * in_scale_ld + block_k)

    first, second, third, fourth = _bytes_by_column(
        gl.convert_layout(tile, BY_COLUMN, assert_trivial=True)
    )
    tile = gl.join(gl.join(first, third), gl.join(second, fourth)).reshape([128, 128])
    n = gl.arange(0, 128, layout=gl.SliceLayout(1, LINES))[:, None]
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, LINES))[None, :]
    inside = (n < rows_left) & (k < words_left * 4)
    target = out_ptr.to(gl.pointer_type(gl.int8)) + (matrix * (words * 4) + first_k) * rows
    target += first_n
    gl.store(target + (k * rows + n), gl.convert_layout(tile, LINES), mask=inside)
    gl.store(out_scale_ptr + (matrix * blocks_k + block_k) * out_scale_ld + block_n, scale)


def plan_transpose(x: Quantized, out: Quantized) -> Launch:
    """The launch that transposes ``x`` ``[..., N, K]`` and its scales into ``out``."""
    data, scale, _ = x
    n = data.shape[-2]
    stack = stack_of(data)
    scale_stride_e = scale.stride(0) if data.ndim == 3 else 0
    unit_n = 16 if n % 16 == 0 else 4
    return Launch(
        transpose_128x128_kernel,
        (stack.programs,),
        (data, scale, out.data, out.scale, n // unit_n, stack.cols, stack.stride_e, stack.stride_n,
         scale_stride_e, stack.blocks_n, stack.blocks_k, scale.stride(-2), out.scale.stride(-2)),
        {"UNIT_N": unit_n, "UNIT_K": stack.unit},
        {"num_warps": _WARPS, "enable_fp_fusion": True},
    )  # fmt: skip


def transpose(x: Quantized) -> Quantized:
    """See :func:`blocktensor.ops.reference.transpose`."""
    return transpose_by(plan_transpose, x)
