"""The Hopper GEMM: persistent programs of one TMA producer warp and independent consumers.

``out[M, N] = A[M, K] B[N, K]^T (+ bias)`` of e4m3 data; A scaled in 1x128 blocks, B in 128x128
(fprop, dgrad) or 1x128 (wgrad). A raw tensor core sum covers 128 of K and is then promoted to fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...runtime.triton_compat import compiler
from .blocks import block_of_rows, block_of_squares
from .epilogue import CHUNK, store_wave
from .pipeline import advance, produce, unknown, work_of
from .promotion import column_scales, pieces, raw_layout, row_scales

NEWER_PTXAS = gl.constexpr(compiler.NEWER_PTXAS)


@gluon.jit
def _mark(TEXT: gl.constexpr):
    # a comment in the assembly, for triton_compat/compiler.py
    gl.inline_asm_elementwise(
        TEXT, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def allocate(a_map, a_scale_map, b_map, b_scale_map, out, OUT: gl.constexpr, T: gl.constexpr):
    """Return the stages with their barriers, and the output buffers; mark kernels."""
    E4M3: gl.constexpr = a_map.dtype
    STAGES: gl.constexpr = T.stages
    a_s = gl.allocate_shared_memory(E4M3, [STAGES * (T.m // T.a_rows), T.a_rows, 128], a_map.layout)
    b_s = gl.allocate_shared_memory(E4M3, [STAGES, T.n, 128], b_map.layout)
    out_s = ()
    if OUT.tma:
        # Within one allocation, the compiler would put a barrier between any two stores.
        for _ in gl.static_range(T.warpgroups * T.out_buffers(out.dtype.primitive_bitwidth)):
            out_s = out_s + (gl.allocate_shared_memory(out.dtype, [64, CHUNK], out.layout),)
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
    if T.b_block == 128:
        _mark(NEWER_PTXAS)
    return (a_s, a_scale_s, b_s, b_scale_s, full, empty), out_s


@gluon.jit
def _consume(stages, work, target, WG: gl.constexpr, OUT: gl.constexpr, T: gl.constexpr):
    # Consumer warpgroup WG: its share of every item of this program.
    _, a_scale_s, _, b_scale_s, full, empty = stages
    M, N, tiles_m, tiles_n, blocks_k, splits = work
    WIDTH: gl.constexpr = T.width
    LAYOUT: gl.constexpr = raw_layout(WIDTH)
    COUNT: gl.constexpr = T.products
    DEPTH: gl.constexpr = T.depth
    COLS: gl.constexpr = T.cols
    WAVES: gl.constexpr = T.rows
    PIECES: gl.constexpr = T.pieces
    PARTS: gl.constexpr = T.cols * T.pieces
    zero = gl.zeros((64, WIDTH), gl.float32, LAYOUT)
    raw = ()
    for _ in gl.static_range(DEPTH):
        raw = raw + (zero,)
    zeros = ()
    for _ in gl.static_range(COUNT):
        zeros = zeros + pieces(zero, T)
    stage = 0
    phase = 0
    mbarrier.wait(full.index(0), 0)
    if T.b_block == 1:
        row = row_scales(a_scale_s, 0, 0, WG, T, LAYOUT)
        cols = ()
        for i in gl.static_range(COLS):
            for j in gl.static_range(PIECES):
                cols = cols + (column_scales(b_scale_s, 0, i, j, WG, T, zeros[j]),)
    items = tiles_m * tiles_n * splits
    programs = gl.num_programs(0)
    total = (items - gl.program_id(0) + programs - 1) // programs * blocks_k
    left = total
    last = 0
    for item in range(gl.program_id(0), items, programs):
        acc = zeros
        if T.b_block == 128:
            tile_m, tile_n, split = work_of(item, tiles_m, tiles_n, OUT.split, T.group)
            first = split * blocks_k
            next_stage, next_phase = advance(stage, phase, T.stages)
            raw, acc = block_of_squares(
                raw, acc, stages, stage, next_stage, next_phase, last, first, left, total, True,
                WG, LAYOUT, T,
            )  # fmt: skip
            last = stage
            stage = next_stage
            phase = next_phase
            left -= 1
        for k in range(0 if T.b_block == 1 else 1, blocks_k):
            next_stage, next_phase = advance(stage, phase, T.stages)
            if T.b_block == 1:
                raw, acc, row, cols = block_of_rows(
                    raw, acc, row, cols, stages, stage, next_stage, next_phase, last, k, left, WG,
                    LAYOUT, T,
                )  # fmt: skip
            else:
                raw, acc = block_of_squares(
                    raw, acc, stages, stage, next_stage, next_phase, last, first + k, left, total,
                    False, WG, LAYOUT, T,
                )  # fmt: skip
            last = stage
            stage = next_stage
            phase = next_phase
            left -= 1
        if T.b_block == 1:
            mbarrier.arrive(empty.index(last), count=1)
            # Not computed earlier: these numbers would take registers that the sums need.
            tile_m, tile_n, split = work_of(unknown(item), tiles_m, tiles_n, OUT.split, T.group)
        row0 = (split * tiles_m + tile_m) * T.m + (WG * WAVES * 64 if T.split == "m" else 0)
        col0 = tile_n * T.n + (WG * COLS * T.width if T.split == "n" else 0)
        for wave in gl.static_range(WAVES):
            store_wave(
                acc[wave * PARTS : (wave + 1) * PARTS],
                target,
                row0 + wave * 64,
                col0,
                0,
                M,
                N,
                wave,
                WG,
                OUT,
                T,
            )
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "M",
        "N",
        "tiles_m",
        "tiles_n",
        "blocks_k",
        "splits",
        "a_scale_ld",
        "b_scale_ld",
    ]
)
def gemm_kernel(
    a_map, a_scale_map, b_map, b_scale_map, out, out_ptr, bias, M, N, tiles_m, tiles_n, blocks_k,
    splits, a_scale_ld, b_scale_ld, out_ld, OUT: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    # `out` is a tensor map if OUT.tma, else a pointer. `bias` is read if OUT.bias. If OUT.split,
    # `out` holds the sums of each of the `splits` of K (`blocks_k` k blocks) one below the other.
    stages, out_s = allocate(a_map, a_scale_map, b_map, b_scale_map, out, OUT, T)
    work = (M, N, tiles_m, tiles_n, blocks_k, splits)
    target = (out, out_ptr, out_ld, out_s, bias, N)
    maps = (a_map, a_scale_map, b_map, b_scale_map, a_scale_ld, b_scale_ld)
    if T.warpgroups == 1:
        gl.warp_specialize(
            [
                (_consume, (stages, work, target, 0, OUT, T)),
                (produce, (stages, work, maps, OUT, T)),
            ],
            [1],
            [24],
        )
    elif T.warpgroups == 2:
        gl.warp_specialize(
            [
                (_consume, (stages, work, target, 0, OUT, T)),
                (_consume, (stages, work, target, 1, OUT, T)),
                (produce, (stages, work, maps, OUT, T)),
            ],
            [4, 1],
            [T.registers, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (stages, work, target, 0, OUT, T)),
                (_consume, (stages, work, target, 1, OUT, T)),
                (_consume, (stages, work, target, 2, OUT, T)),
                (produce, (stages, work, maps, OUT, T)),
            ],
            [4, 4, 1],
            [T.registers, T.registers, 32],
        )
