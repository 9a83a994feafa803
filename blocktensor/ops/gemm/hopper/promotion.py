"""Compute tensor core products in a consumer warpgroup, read scales, and promote to fp32."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@gluon.constexpr_function
def raw_layout(width, depth=32):
    """Return the registers of a raw accumulator of ``width`` columns.

    An instruction multiplies ``depth`` columns of the operands: 32 in FP8, 16 of 16 bits.
    """
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, depth]
    )


@gluon.jit
def put(values, AT: gl.constexpr, value):
    # the tuple with `value` at AT
    return values[:AT] + (value,) + values[AT + 1 :]


@gluon.jit
def pin(x):
    # No instruction, but a fixed position: LLVM would sink promotions below the next product, which
    # then needs a raw accumulator of its own, and move loads up to the loop's head.
    return gl.inline_asm_elementwise("// pin", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def halves(x):
    # [64, n] -> columns [0, n/2) and [n/2, n); no instruction
    N: gl.constexpr = x.shape[1]
    return x.reshape((x.shape[0], 2, N // 2)).permute((0, 2, 1)).split()


@gluon.jit
def pieces(x, T: gl.constexpr):
    # A raw accumulator as tensors of 64 columns.
    if T.width == 64:
        parts = (x,)
    else:
        parts = halves(x)
    return parts


@gluon.jit
def start(
    raw,
    a_s,
    b_s,
    stage,
    INDEX: gl.constexpr,
    WG: gl.constexpr,
    T: gl.constexpr,
    PARTS: gl.constexpr = 1,
):
    # Starts product INDEX of this warpgroup's share of the stage, asynchronously. The memory may be
    # viewed as PARTS operands for each one of a k block; the first is read.
    A_COPIES: gl.constexpr = T.a_copies
    ROW: gl.constexpr = (WG * T.rows if T.split == "m" else 0) * 64 + INDEX // T.cols * 64
    COL: gl.constexpr = ((WG * T.cols if T.split == "n" else 0) + INDEX % T.cols) * T.width
    a = a_s.index((stage * A_COPIES + ROW // T.a_rows) * PARTS)
    if T.a_rows > 64:
        a = a.slice(ROW % T.a_rows, 64, dim=0)
    b = b_s.index(stage * PARTS)
    if T.n > T.width:
        b = b.slice(COL, T.width, dim=0)
    return warpgroup_mma(a, b.permute((1, 0)), raw, use_acc=False, is_async=True)


@gluon.jit
def row_scales(
    scales, stage, WAVE: gl.constexpr, WG: gl.constexpr, T: gl.constexpr, LAYOUT: gl.constexpr
):
    # [64]: scales of row wave WAVE
    ROW: gl.constexpr = ((WG * T.rows if T.split == "m" else 0) + WAVE) * 64
    return scales.index(stage).slice(ROW, 64).load(gl.SliceLayout(1, LAYOUT))


@gluon.jit
def column_scales(
    scales,
    stage,
    PART: gl.constexpr,
    PIECE: gl.constexpr,
    WG: gl.constexpr,
    T: gl.constexpr,
    like,
):
    # [columns of `like`]: scales of piece PIECE of column part PART
    COL: gl.constexpr = ((WG * T.cols if T.split == "n" else 0) + PART) * T.width
    return scales.index(stage).slice(COL + PIECE * 64, 64).load(gl.SliceLayout(0, like.type.layout))


@gluon.jit
def along_rows(scale, like):
    layout: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    return gl.convert_layout(scale, layout, assert_trivial=True)[:, None]


@gluon.jit
def promote_rows(acc, raw, row, FIRST: gl.constexpr):
    # acc + raw * row, where row includes the scale of B. FIRST: raw * row, since sums begin here.
    row = along_rows(row, raw)
    return pin(raw * row) if FIRST else pin(acc + raw * row)


@gluon.jit
def promote(acc, raw, row, col):
    # acc + raw * col * row. A thread holds 2 rows x 2 columns in four consecutive registers. In
    # this order two consecutive instructions share an operand, which saves a register read. Tensor
    # cores and FMAs compete for register ports: register reads limit the kernel.
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 t<4>;
        mul.rn.f32 t0, $8, $16;
        mul.rn.f32 t2, $10, $18;
        mul.rn.f32 t1, $9, $17;
        mul.rn.f32 t3, $11, $19;
        fma.rn.f32 $0, t0, $12, $0;
        fma.rn.f32 $1, t1, $13, $1;
        fma.rn.f32 $2, t2, $14, $2;
        fma.rn.f32 $3, t3, $15, $3;
        }""",
        "=f,=f,=f,=f,0,1,2,3,f,f,f,f,f,f,f,f,f,f,f,f",
        [acc, raw, along_rows(row, raw), col[None, :]],
        dtype=gl.float32,
        is_pure=False,
        pack=4,
    )
