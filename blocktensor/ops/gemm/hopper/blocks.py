"""Multiply one k block in one consumer warpgroup: 128 of K, promoted once."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ...runtime.triton_compat.gluon import reinterpret
from .promotion import column_scales, pieces, pin, promote, promote_rows, put, row_scales, start


@gluon.jit
def block_of_squares(
    raw, acc, stages, stage, next_stage, next_phase, last, k, left, total, FIRST: gl.constexpr,
    WG: gl.constexpr, LAYOUT: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    # B in 128x128 blocks. FIRST: the first k block of a tile, where sums begin. While a product is
    # under way, scales are read, the last stage is released and the next one awaited.
    a_s, a_scale_s, b_s, b_scale_s, full, empty = stages
    COUNT: gl.constexpr = T.products
    PIECES: gl.constexpr = T.pieces
    SINGLES: gl.constexpr = T.stages * T.b_scale_copies * T.b_scales
    singles = reinterpret(b_scale_s, gl.float32, [SINGLES, 1], b_scale_s.layout)
    for i in gl.static_range(COUNT):
        (product,) = raw
        product = start(product, a_s, b_s, stage, i, WG, T)
        if i == 0:
            mbarrier.arrive(empty.index(last), count=1, pred=left != total)
            copy = stage * T.b_scale_copies + (WG if T.split == "n" else 0)
            b_scale = singles.index(copy * T.b_scales + k % 4).load(gl.SliceLayout(1, LAYOUT))
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
    PRODUCT: gl.constexpr,
    PIECE: gl.constexpr,
    WG: gl.constexpr,
    T: gl.constexpr,
):
    # After the last use of a piece's column scales, the scales of the next k block are read into
    # the registers that are now free.
    TARGET: gl.constexpr = PRODUCT * T.pieces + PIECE
    SCALE: gl.constexpr = PRODUCT % T.cols * T.pieces + PIECE
    acc = put(acc, TARGET, promote(acc[TARGET], part, row, cols[SCALE]))
    if PRODUCT >= T.products - T.cols:
        ahead = column_scales(b_scale_s, next_stage, PRODUCT % T.cols, PIECE, WG, T, part)
        cols = put(cols, SCALE, pin(ahead))
    return acc, cols


@gluon.jit
def block_of_rows(
    raw, acc, row, cols, stages, stage, next_stage, next_phase, last, k, left, WG: gl.constexpr,
    LAYOUT: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    # Both operands in 1x128 blocks. DEPTH products are under way while one is promoted; the next
    # block's scales are read as the last promotions free their registers.
    a_s, a_scale_s, b_s, b_scale_s, full, empty = stages
    COUNT: gl.constexpr = T.products
    DEPTH: gl.constexpr = T.depth
    PIECES: gl.constexpr = T.pieces
    WAVES: gl.constexpr = T.rows
    # ptxas moves promotions behind the wait for a later product, unless the wait for the next stage
    # or the release of the last one stands between: hence their places.
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
            (DEPTH if COUNT - i > DEPTH else COUNT - i) - 1, deps=(raw[i % DEPTH],)
        )
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
