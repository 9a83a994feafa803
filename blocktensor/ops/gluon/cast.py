"""Columnwise casts of 16-bit tensors without a trip of the data through shared memory.

Each thread holds a patch of 16 rows x 8 columns. Rowwise bytes leave it 8 at a time; reordering its
registers, which costs nothing, puts 16 consecutive rows of a column next to each other, so that the
transposed bytes leave in 16-byte stores. Only the block maxima and what is derived from them pass
between threads.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..layouts import BLOCK, Form, ceil_div, num_blocks
from ..triton.cast import both_by, columnwise_by
from ..triton.launch import Launch
from ..triton.numerics import divisor, quotient, scale_from_bits
from ..triton.replay import replayed

_WARPS = 4


@gluon.constexpr_function
def _patch_layouts():
    # The same ownership twice: 4 warps x 2 lanes x 16 rows by 16 lanes x 8 columns. `by_row` keeps
    # the 8 columns of a row together in registers, `by_column` the 16 rows of a column.
    columns = [[0, 1], [0, 2], [0, 4]]
    rows = [[1, 0], [2, 0], [4, 0], [8, 0]]
    lanes = [[0, 8], [0, 16], [0, 32], [0, 64], [16, 0]]
    warps = [[32, 0], [64, 0]]
    by_row = gl.DistributedLinearLayout(columns + rows, lanes, warps, [], [128, 128])
    by_column = gl.DistributedLinearLayout(rows + columns, lanes, warps, [], [128, 128])
    return by_row, by_column


@gluon.jit
def _fresh(x):
    # Forgets that x was widened to fp32 before: the compiler then widens it again where it is
    # needed, instead of holding the whole tile in fp32 registers (255 of them, and spills).
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
    )


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _widen(bits, DTYPE: gl.constexpr):
    return bits.to(DTYPE, bitcast=True).to(gl.float32).to(gl.int32, bitcast=True)


@gluon.jit
def _broadcast_divisor(
    amax, scale, AXIS: gl.constexpr, like, METHOD: gl.constexpr, POWER_OF_TWO: gl.constexpr
):
    # (pre, r, e) of each block along AXIS, spread over the tile `like`
    layout: gl.constexpr = gl.SliceLayout(AXIS, like.type.layout)
    pre, r, e = divisor(amax, scale, METHOD, POWER_OF_TWO)
    pre = gl.convert_layout(pre, layout).expand_dims(AXIS)
    r = gl.convert_layout(r, layout).expand_dims(AXIS)
    e = gl.convert_layout(e, layout).expand_dims(AXIS)
    return pre, r, e


@gluon.jit(do_not_specialize=["rows", "row_scale_ld", "col_scale_ld", "blocks_k"])
def cast_columnwise_kernel(
    x_ptr,
    row_ptr,
    row_scale_ptr,
    col_ptr,
    col_scale_ptr,
    rows,
    cols,
    stride_m,
    out_ld,
    row_scale_ld,
    col_scale_ld,
    blocks_k,
    ROWWISE: gl.constexpr,
    EVEN: gl.constexpr,
    POWER_OF_TWO: gl.constexpr,
    METHOD: gl.constexpr,
):
    # One program casts a tile [128, 128], read once; out_ld = rows, told apart so that its
    # divisibility by 16 is specialised.
    LAYOUTS: gl.constexpr = _patch_layouts()
    BY_ROW: gl.constexpr = LAYOUTS[0]
    BY_COLUMN: gl.constexpr = LAYOUTS[1]
    ONE_EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile = gl.program_id(0)
    tile_m = tile // blocks_k
    tile_k = tile % blocks_k
    first_m = tile_m.to(gl.int64) * 128
    first_k = tile_k.to(gl.int64) * 128
    rows_left = rows - tile_m * 128
    cols_left = cols - tile_k * 128
    each = gl.arange(0, 128, layout=ONE_EACH)
    m = gl.arange(0, 128, layout=gl.SliceLayout(1, BY_ROW))[:, None]
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, BY_ROW))[None, :]
    inside = (m < rows_left) & (k < cols_left)

    source = x_ptr + first_m * stride_m + first_k + (m * stride_m + k)
    if EVEN:
        x = gl.load(source)
    else:
        x = gl.load(source, mask=inside, other=0.0)
    bits = x.to(gl.int16, bitcast=True) & 0x7FFF  # |x|, NaN above Inf above finite
    col_amax = _widen(gl.convert_layout(gl.reduce(bits, 0, _larger), ONE_EACH), x.dtype)
    col_scale = scale_from_bits(col_amax, METHOD, POWER_OF_TWO)
    gl.store(
        col_scale_ptr + tile_m.to(gl.int64) * col_scale_ld + first_k + each,
        col_scale,
        mask=each < cols_left,
    )

    if ROWWISE:
        row_amax = _widen(gl.convert_layout(gl.reduce(bits, 1, _larger), ONE_EACH), x.dtype)
        row_scale = scale_from_bits(row_amax, METHOD, POWER_OF_TWO)
        gl.store(
            row_scale_ptr + tile_k.to(gl.int64) * row_scale_ld + first_m + each,
            row_scale,
            mask=each < rows_left,
        )
        pre, r, e = _broadcast_divisor(row_amax, row_scale, 1, x, METHOD, POWER_OF_TWO)
        x = _fresh(x)
        q = quotient(x, pre, r, e, METHOD, POWER_OF_TWO).to(gl.float8e4nv)
        target = row_ptr + first_m * cols + first_k + (m * cols + k)
        if EVEN:
            gl.store(target, q)
        else:
            gl.store(target, q, mask=inside)

    x = gl.convert_layout(_fresh(x), BY_COLUMN, assert_trivial=True)
    pre, r, e = _broadcast_divisor(col_amax, col_scale, 0, x, METHOD, POWER_OF_TWO)
    q = quotient(x, pre, r, e, METHOD, POWER_OF_TWO).to(gl.float8e4nv)
    m = gl.arange(0, 128, layout=gl.SliceLayout(1, BY_COLUMN))[:, None]
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, BY_COLUMN))[None, :]
    target = col_ptr + first_k * out_ld + first_m + (k * out_ld + m)
    if EVEN:
        gl.store(target, q)
    else:
        gl.store(target, q, mask=(m < rows_left) & (k < cols_left))


def takes(x: Tensor) -> bool:
    """Whether ``x[M, K]`` can be cast here: 16-bit, rows contiguous, all in vectors of 16."""
    return (
        x.element_size() == 2
        and x.stride(1) == 1
        and x.shape[0] % 16 == 0
        and x.shape[1] % 16 == 0
        and x.stride(0) % 16 == 0
        and x.data_ptr() % 16 == 0
        and max(x.stride(0), x.shape[0]) < 2**24  # 32-bit offsets inside a tile
    )


def plan_columnwise(x: Tensor, row: Form | None, col: Form, power_of_two: bool) -> Launch:
    """The launch that casts ``x[M, K]`` into ``col`` and, unless None, ``row``: (data, scale)."""
    m, k = x.shape
    row_data, row_scale = row or col
    blocks_k = num_blocks(k)
    return Launch(
        cast_columnwise_kernel,
        (ceil_div(m, BLOCK) * blocks_k,),
        (x, row_data, row_scale, *col, m, k, x.stride(0), m, row_scale.stride(1),
         col[1].stride(1), blocks_k),
        {
            "ROWWISE": row is not None,
            "EVEN": m % BLOCK == 0 and k % BLOCK == 0,
            "POWER_OF_TWO": power_of_two,
            "METHOD": "corrected",
        },
        {"num_warps": _WARPS},
    )  # fmt: skip


@replayed
def quantize_columnwise(x: Tensor, power_of_two: bool) -> Form:
    """See :func:`blocktensor.ops.reference.quantize_columnwise`."""
    return columnwise_by(plan_columnwise, x, power_of_two)


@replayed
def quantize_both(x: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`blocktensor.ops.reference.quantize_both`; reads ``x`` once."""
    return both_by(plan_columnwise, x, power_of_two)
