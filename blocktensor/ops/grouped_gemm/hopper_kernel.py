"""The grouped Hopper GEMM: the products and stores of the dense GEMM, on items of groups.

``out[T, N] = A[T, K] B[e, N, K]^T (+ left[T, R] right[e, N, R]^T) (+ bias[e])`` for the rows of
group e of A: groups cut rows (fprop, dgrad). ``out[e, N, K] = A[N, P] B[K, P]^T`` over the columns
of group e (wgrad).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from ..gemm.hopper.blocks import block_of_rows, block_of_squares
from ..gemm.hopper.epilogue import store_wave
from ..gemm.hopper.kernel import allocate
from ..gemm.hopper.pipeline import advance
from ..gemm.hopper.promotion import column_scales, pieces, pin, put, raw_layout, row_scales, start
from .hopper_items import (
    BEGIN,
    BLOCKS,
    END,
    EXPERT,
    FIELDS,
    FIRST,
    ROW,
    SLOTS,
    TILE_N,
    field,
    low_rank_stages,
)
from .hopper_items import produce as _produce


@gluon.jit
def _zeros(COUNT: gl.constexpr, T: gl.constexpr):
    WIDTH: gl.constexpr = T.width
    zero = gl.zeros((64, WIDTH), gl.float32, raw_layout(WIDTH))
    zeros = ()
    for _ in gl.static_range(COUNT):
        zeros = zeros + (zero,)
    return zeros


@gluon.jit
def _accumulators(T: gl.constexpr):
    COUNT: gl.constexpr = T.products
    WIDTH: gl.constexpr = T.width
    zero = gl.zeros((64, WIDTH), gl.float32, raw_layout(WIDTH))
    zeros = ()
    for _ in gl.static_range(COUNT):
        zeros = zeros + pieces(zero, T)
    return zeros


@gluon.jit
def _store(acc, items, slot, target, N, WG: gl.constexpr, OUT: gl.constexpr, T: gl.constexpr):
    WAVES: gl.constexpr = T.rows
    PARTS: gl.constexpr = T.cols * T.pieces
    out, out_ptr, out_ld, out_s, bias = target
    row = field(items, slot, ROW) + (WG * WAVES * 64 if T.split == "m" else 0)
    col = field(items, slot, TILE_N) * T.n + (WG * T.cols * T.width if T.split == "n" else 0)
    begin = field(items, slot, BEGIN) if OUT.cuts_rows else 0
    end = field(items, slot, END)
    biased = N
    if OUT.bias:
        expert = field(items, slot, EXPERT)
        bias += gl.maximum(expert, 0).to(gl.int64) * N
        biased = gl.where(expert < 0, 0, N)
    of_item = (out, out_ptr, out_ld, out_s, bias, biased)
    for wave in gl.static_range(WAVES):
        store_wave(
            acc[wave * PARTS : (wave + 1) * PARTS],
            of_item,
            row + wave * 64,
            col,
            begin,
            end,
            N,
            wave,
            WG,
            OUT,
            T,
        )


@gluon.jit
def _add_low_rank(
    raw, acc, stages, low_rank, stage, next_stage, next_phase, last, WG: gl.constexpr,
    OUT: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    # The last stage of an item, as block_of_squares: its products need no scales.
    _, _, _, _, full, empty = stages
    left_s, right_s = low_rank_stages(stages, low_rank, OUT)
    COUNT: gl.constexpr = T.products
    PIECES: gl.constexpr = T.pieces
    LAYOUT: gl.constexpr = raw_layout(T.width)
    OF_16_BITS: gl.constexpr = raw_layout(T.width, 16)
    for i in gl.static_range(COUNT):
        (product,) = raw
        product = gl.convert_layout(product, OF_16_BITS, assert_trivial=True)
        product = start(product, left_s, right_s, stage, i, WG, T, 64 // OUT.rank)
        if i == 0:
            mbarrier.arrive(empty.index(last), count=1)
        if i == COUNT - 1:
            mbarrier.wait(full.index(next_stage), next_phase)
        product = warpgroup_mma_wait(0, deps=(product,))
        product = gl.convert_layout(product, LAYOUT, assert_trivial=True)
        parts = pieces(product, T)
        for j in gl.static_range(PIECES):
            acc = put(acc, i * PIECES + j, pin(acc[i * PIECES + j] + parts[j]))
        raw = (product,)
    return raw, acc


@gluon.jit
def _consume_squares(
    stages, items, low_rank, target, N, WG: gl.constexpr, OUT: gl.constexpr, T: gl.constexpr
):
    # Consumer warpgroup WG: its share of every item, where B has 128x128 blocks. After the last
    # item the producer fills one more stage with nothing: the next stage may always be awaited.
    _, _, _, _, full, _ = stages
    LAYOUT: gl.constexpr = raw_layout(T.width)
    raw = _zeros(1, T)
    zeros = _accumulators(T)
    stage = 0
    phase = 0
    last = 0
    slot = 0
    started = 0  # 1: an earlier item has a stage to release
    mbarrier.wait(full.index(0), 0)
    blocks = field(items, slot, BLOCKS)
    while blocks > 0:
        first = 0 if OUT.cuts_rows else field(items, slot, FIRST)
        next_stage, next_phase = advance(stage, phase, T.stages)
        raw, acc = block_of_squares(
            raw, zeros, stages, stage, next_stage, next_phase, last, first, 2, 2 + started, True,
            WG, LAYOUT, T,
        )  # fmt: skip
        last = stage
        stage = next_stage
        phase = next_phase
        for k in range(1, blocks):
            next_stage, next_phase = advance(stage, phase, T.stages)
            raw, acc = block_of_squares(
                raw, acc, stages, stage, next_stage, next_phase, last, first + k, 2, 3, False, WG,
                LAYOUT, T,
            )  # fmt: skip
            last = stage
            stage = next_stage
            phase = next_phase
        if OUT.rank:
            next_stage, next_phase = advance(stage, phase, T.stages)
            raw, acc = _add_low_rank(
                raw, acc, stages, low_rank, stage, next_stage, next_phase, last, WG, OUT, T
            )
            last = stage
            stage = next_stage
            phase = next_phase
        _store(acc, items, slot, target, N, WG, OUT, T)
        started = 1
        slot = (slot + 1) % SLOTS
        blocks = field(items, slot, BLOCKS)
    tma.store_wait(0)


@gluon.jit
def _consume_rows(stages, items, target, N, WG: gl.constexpr, OUT: gl.constexpr, T: gl.constexpr):
    # The same where both operands have 1x128 blocks: scales are read a block ahead.
    _, a_scale_s, _, b_scale_s, full, empty = stages
    LAYOUT: gl.constexpr = raw_layout(T.width)
    COLS: gl.constexpr = T.cols
    DEPTH: gl.constexpr = T.depth
    PIECES: gl.constexpr = T.pieces
    raw = _zeros(DEPTH, T)
    zeros = _accumulators(T)
    stage = 0
    phase = 0
    last = 0
    slot = 0
    mbarrier.wait(full.index(0), 0)
    row = row_scales(a_scale_s, 0, 0, WG, T, LAYOUT)
    cols = ()
    for i in gl.static_range(COLS):
        for j in gl.static_range(PIECES):
            cols = cols + (column_scales(b_scale_s, 0, i, j, WG, T, zeros[j]),)
    blocks = field(items, slot, BLOCKS)
    while blocks > 0:
        acc = zeros
        for k in range(blocks):
            next_stage, next_phase = advance(stage, phase, T.stages)
            raw, acc, row, cols = block_of_rows(
                raw, acc, row, cols, stages, stage, next_stage, next_phase, last, k, 2, WG, LAYOUT,
                T,
            )  # fmt: skip
            last = stage
            stage = next_stage
            phase = next_phase
        mbarrier.arrive(empty.index(last), count=1)
        _store(acc, items, slot, target, N, WG, OUT, T)
        slot = (slot + 1) % SLOTS
        blocks = field(items, slot, BLOCKS)
    tma.store_wait(0)


@gluon.jit
def _consume(
    stages, items, low_rank, target, N, WG: gl.constexpr, OUT: gl.constexpr, T: gl.constexpr
):
    if T.b_block == 128:
        _consume_squares(stages, items, low_rank, target, N, WG, OUT, T)
    else:
        _consume_rows(stages, items, target, N, WG, OUT, T)


@gluon.jit(
    do_not_specialize=[
        "tokens",
        "expert_rows",
        "N",
        "groups",
        "tiles_m",
        "tiles_n",
        "blocks_k",
        "blocks_n",
        "a_scale_ld",
        "b_scale_ld",
    ]
)
def grouped_kernel(
    a_map, a_scale_map, b_map, b_scale_map, left_map, right_map, out, out_ptr, bias, offs, tokens,
    expert_rows, N, groups, tiles_m, tiles_n, blocks_k, blocks_n, a_scale_ld, b_scale_ld, out_ld,
    OUT: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    # `out` is a tensor map if OUT.tma, else a pointer. An expert has `expert_rows` rows in B
    # (fprop, dgrad) or in the output (wgrad). N: columns of the output. `left_map` and `right_map`
    # are read if OUT.rank.
    stages, out_s = allocate(a_map, a_scale_map, b_map, b_scale_map, out, OUT, T)
    items = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], b_scale_map.layout)
    maps = (a_map, a_scale_map, b_map, b_scale_map, a_scale_ld, b_scale_ld)
    work = (offs, groups, tokens, expert_rows, tiles_m, tiles_n, blocks_k, blocks_n)
    low_rank = (left_map, right_map)
    target = (out, out_ptr, out_ld, out_s, bias)
    if T.warpgroups == 1:
        gl.warp_specialize(
            [
                (_consume, (stages, items, low_rank, target, N, 0, OUT, T)),
                (_produce, (stages, items, maps, low_rank, work, OUT, T)),
            ],
            [1],
            [24],
        )
    elif T.warpgroups == 2:
        gl.warp_specialize(
            [
                (_consume, (stages, items, low_rank, target, N, 0, OUT, T)),
                (_consume, (stages, items, low_rank, target, N, 1, OUT, T)),
                (_produce, (stages, items, maps, low_rank, work, OUT, T)),
            ],
            [4, 1],
            [T.registers, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (stages, items, low_rank, target, N, 0, OUT, T)),
                (_consume, (stages, items, low_rank, target, N, 1, OUT, T)),
                (_consume, (stages, items, low_rank, target, N, 2, OUT, T)),
                (_produce, (stages, items, maps, low_rank, work, OUT, T)),
            ],
            [4, 4, 1],
            [T.registers, T.registers, 32],
        )
