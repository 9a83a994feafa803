"""The Hopper GEMM: persistent, fed by TMA, one producer warp, consumer warpgroups of their own pace.

``out[M, N] (+)= A[M, K] B[N, K]^T (+ bias)`` of e4m3 data; A scaled in 1x128 blocks, B in 128x128
(fprop, dgrad) or 1x128 (wgrad). A raw tensor core sum covers 128 of K and is then promoted to fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from . import narrow
from .epilogue import CHUNK, store_wave
from .pipeline import advance, produce, tile_of, unknown
from .products import (
    column_scales,
    pieces,
    pin,
    promote,
    promote_rows,
    put,
    row_scales,
    start,
)

MARK_96 = gl.constexpr(narrow.MARK)


@gluon.jit
def _block_of_squares(
    raw,
    acc,
    a_s,
    a_scale_s,
    b_s,
    b_scale_s,
    full,
    empty,
    stage,
    next_stage,
    next_phase,
    last,
    k,
    left,
    total,
    FIRST: gl.constexpr,
    WG: gl.constexpr,
    LAYOUT: gl.constexpr,
    T: gl.constexpr,
):
    # One k block, B in 128x128 blocks; FIRST of a tile: sums start here. Whatever is not a product or a promotion happens while a
    # product is under way: scales, the release of the stage before, the wait for the next.
    COUNT: gl.constexpr = T.products
    PIECES: gl.constexpr = T.pieces
    singles = b_scale_s._reinterpret(gl.float32, [T.stages * T.b_scales, 1], b_scale_s.layout)
    for i in gl.static_range(COUNT):
        (product,) = raw
        product = start(product, a_s, b_s, stage, i, WG, T)
        if i == 0:
            mbarrier.arrive(empty.index(last), count=1, pred=left != total)
            b_scale = singles.index(stage * T.b_scales + k % 4).load(gl.SliceLayout(1, LAYOUT))
        scale = row_scales(a_scale_s, stage, i // T.cols, WG, T, LAYOUT) * b_scale
        if i == COUNT - 1:
            mbarrier.wait(full.index(next_stage), next_phase, pred=left > 1)
        product = warpgroup_mma_wait(0, deps=(product,))
        parts = pieces(product, T)
        for j in gl.static_range(PIECES):
            summed = promote_rows(acc[i * PIECES + j], parts[j], scale, FIRST)
            acc = put(acc, i * PIECES + j, summed)
        raw = (product,)
    return raw, acc


@gluon.jit
def _promote_piece(
    acc,
    cols,
    part,
    row,
    b_scale_s,
    next_stage,
    I: gl.constexpr,
    J: gl.constexpr,
    WG: gl.constexpr,
    T: gl.constexpr,
):
    # Piece J of product I; then its column scales are replaced by the next block's if this was
    # their last use: the registers are free just now.
    TARGET: gl.constexpr = I * T.pieces + J
    SCALE: gl.constexpr = I % T.cols * T.pieces + J
    acc = put(acc, TARGET, promote(acc[TARGET], part, row, cols[SCALE]))
    if I >= T.products - T.cols:
        ahead = column_scales(b_scale_s, next_stage, I % T.cols, J, WG, T, part)
        cols = put(cols, SCALE, pin(ahead))
    return acc, cols


@gluon.jit
def _block_of_rows(
    raw,
    acc,
    row,
    cols,
    a_s,
    a_scale_s,
    b_s,
    b_scale_s,
    full,
    empty,
    stage,
    next_stage,
    next_phase,
    last,
    k,
    left,
    WG: gl.constexpr,
    LAYOUT: gl.constexpr,
    T: gl.constexpr,
):
    # One k block, both operands in 1x128 blocks. DEPTH products are under way while one is
    # promoted; the next block's scales are read as the last promotions free their registers.
    COUNT: gl.constexpr = T.products
    DEPTH: gl.constexpr = T.depth
    PIECES: gl.constexpr = T.pieces
    WAVES: gl.constexpr = T.rows
    WAIT: gl.constexpr = COUNT - T.cols
    RELEASE: gl.constexpr = COUNT - 1 if COUNT > DEPTH else 0
    for i in gl.static_range(DEPTH):
        raw = put(raw, i, start(raw[i], a_s, b_s, stage, i, WG, T))
    rows = (row,)
    for wave in gl.static_range(1, WAVES):
        rows = rows + (row_scales(a_scale_s, stage, wave, WG, T, LAYOUT),)
    for i in gl.static_range(COUNT):
        if i == WAIT:
            mbarrier.wait(full.index(next_stage), next_phase, pred=left > 1)
        if i == RELEASE:
            mbarrier.arrive(empty.index(last), count=1, pred=k > 0)
        product = warpgroup_mma_wait(
            (DEPTH if COUNT - i > DEPTH else COUNT - i) - 1, deps=(raw[i % DEPTH],))
        parts = pieces(product, T)
        for j in gl.static_range(PIECES):
            acc, cols = _promote_piece(
                acc, cols, parts[j], rows[i // T.cols], b_scale_s, next_stage, i, j, WG, T
            )
        if i + DEPTH < COUNT:
            product = start(product, a_s, b_s, stage, i + DEPTH, WG, T)
        raw = put(raw, i % DEPTH, product)
    row = pin(row_scales(a_scale_s, next_stage, 0, WG, T, LAYOUT))
    return raw, acc, row, cols


@gluon.jit
def _consume(
    out,
    bias,
    a_s,
    a_scale_s,
    b_s,
    b_scale_s,
    out_s,
    full,
    empty,
    M,
    N,
    tiles_m,
    tiles_n,
    blocks_k,
    out_ld,
    WG: gl.constexpr,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    TMA: gl.constexpr,
    T: gl.constexpr,
):
    # Consumer warpgroup WG: all tiles of this program, their part that falls to it.
    WIDTH: gl.constexpr = T.raw_width
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32]
    )
    COUNT: gl.constexpr = T.products
    DEPTH: gl.constexpr = T.depth
    PIECES: gl.constexpr = T.pieces
    COLS: gl.constexpr = T.cols
    WAVES: gl.constexpr = T.rows
    PARTS: gl.constexpr = T.cols * T.pieces
    zero = gl.zeros((64, WIDTH), gl.float32, LAYOUT)
    raw = ()
    for i in gl.static_range(DEPTH):
        raw = raw + (zero,)
    zeros = ()
    for i in gl.static_range(COUNT):
        zeros = zeros + pieces(zero, T)
    stage = 0
    phase = 0
    mbarrier.wait(full.index(0), 0)
    if T.b_block == 1:
        row = row_scales(a_scale_s, 0, 0, WG, T, LAYOUT)
        cols = ()
        for part in gl.static_range(COLS):
            for j in gl.static_range(PIECES):
                cols = cols + (column_scales(b_scale_s, 0, part, j, WG, T, zeros[j]),)
    tiles = tiles_m * tiles_n
    programs = gl.num_programs(0)
    total = (tiles - gl.program_id(0) + programs - 1) // programs * blocks_k
    left = total
    last = 0
    for tile in range(gl.program_id(0), tiles, programs):
        acc = zeros
        if T.b_block == 128:
            tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, T.group)
            next_stage, next_phase = advance(stage, phase, T.stages)
            raw, acc = _block_of_squares(
                raw, acc, a_s, a_scale_s, b_s, b_scale_s, full, empty,
                stage, next_stage, next_phase, last, 0, left, total, True, WG, LAYOUT, T,
            )  # fmt: skip
            last = stage
            stage = next_stage
            phase = next_phase
            left -= 1
        for k in range(0 if T.b_block == 1 else 1, blocks_k):
            next_stage, next_phase = advance(stage, phase, T.stages)
            if T.b_block == 1:
                raw, acc, row, cols = _block_of_rows(
                    raw, acc, row, cols, a_s, a_scale_s, b_s, b_scale_s, full, empty,
                    stage, next_stage, next_phase, last, k, left, WG, LAYOUT, T,
                )  # fmt: skip
            else:
                raw, acc = _block_of_squares(
                    raw, acc, a_s, a_scale_s, b_s, b_scale_s, full, empty,
                    stage, next_stage, next_phase, last, k, left, total, False, WG, LAYOUT, T,
                )  # fmt: skip
            last = stage
            stage = next_stage
            phase = next_phase
            left -= 1
        if T.b_block == 1:
            mbarrier.arrive(empty.index(last), count=1)
            # Not before: these numbers would take registers that the sums need.
            tile_m, tile_n = tile_of(unknown(tile), tiles_m, tiles_n, T.group)
        row0 = tile_m * T.m + (WG * WAVES * 64 if T.split == "m" else 0)
        col0 = tile_n * T.n + (WG * COLS * T.width if T.split == "n" else 0)
        for wave in gl.static_range(WAVES):
            store_wave(
                acc[wave * PARTS : (wave + 1) * PARTS], out, out_s, bias, row0 + wave * 64, col0,
                M, N, out_ld, wave, WG, BIAS, ADD, TMA, T,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _mark(TEXT: gl.constexpr):
    # a comment in the assembly, for ops/gluon/assembly.py
    gl.inline_asm_elementwise(
        TEXT, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit(
    do_not_specialize=["M", "N", "tiles_m", "tiles_n", "blocks_k", "a_scale_ld", "b_scale_ld"]
)
def gemm_kernel(
    a_map,
    a_scale_map,
    b_map,
    b_scale_map,
    out,
    bias,
    M,
    N,
    tiles_m,
    tiles_n,
    blocks_k,
    a_scale_ld,
    b_scale_ld,
    out_ld,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    TMA: gl.constexpr,
    T: gl.constexpr,
):
    # `out` is a tensor map where TMA, else a pointer. `bias` is read where BIAS.
    E4M3: gl.constexpr = a_map.dtype
    STAGES: gl.constexpr = T.stages
    B_STEPS: gl.constexpr = T.n // T.b_rows_apart
    a_s = gl.allocate_shared_memory(E4M3, [STAGES * (T.m // T.a_rows), T.a_rows, 128], a_map.layout)
    b_s = gl.allocate_shared_memory(E4M3, [STAGES * B_STEPS, T.b_rows_apart, 128], b_map.layout)
    if TMA:
        BUFFERS: gl.constexpr = T.buffers * 16 // out.dtype.primitive_bitwidth
        out_s = gl.allocate_shared_memory(
            out.dtype, [T.warpgroups * BUFFERS, 64, CHUNK], out.layout
        )
    else:
        out_s = a_s
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
        _mark(MARK_96)
    if T.warpgroups == 1:
        gl.warp_specialize(
            [
                (_consume, (out, bias, a_s, a_scale_s, b_s, b_scale_s, out_s, full, empty, M, N, tiles_m,
                 tiles_n, blocks_k, out_ld, 0, BIAS, ADD, TMA, T)),
                (produce, (a_map, a_scale_map, b_map, b_scale_map, a_s, a_scale_s, b_s, b_scale_s, full,
                 empty, tiles_m, tiles_n, blocks_k, a_scale_ld, b_scale_ld, T)),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (out, bias, a_s, a_scale_s, b_s, b_scale_s, out_s, full, empty, M, N, tiles_m,
                 tiles_n, blocks_k, out_ld, 0, BIAS, ADD, TMA, T)),
                (_consume, (out, bias, a_s, a_scale_s, b_s, b_scale_s, out_s, full, empty, M, N, tiles_m,
                 tiles_n, blocks_k, out_ld, 1, BIAS, ADD, TMA, T)),
                (produce, (a_map, a_scale_map, b_map, b_scale_map, a_s, a_scale_s, b_s, b_scale_s, full,
                 empty, tiles_m, tiles_n, blocks_k, a_scale_ld, b_scale_ld, T)),
            ],
            [4, 1],
            [T.registers, 24],
        )  # fmt: skip
