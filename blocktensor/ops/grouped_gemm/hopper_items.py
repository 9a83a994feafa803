"""Device functions of the producer warp: the items of a grouped GEMM, and their operands.

An item is one tile of the output of one expert. The producer finds the items of its program from
the ends of the groups, which are on the device, and describes each in shared memory: consumers do
not look for groups.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..gemm.hopper.pipeline import advance, prefetch_tile, tile_of

SLOTS = gl.constexpr(8)
"""Items described at a time. Consumers are behind by an item a stage at most, and by the current
one: more than the stages of any tile."""

BLOCKS = gl.constexpr(0)  # k blocks; 0: no more items
ROW = gl.constexpr(1)  # the first row of the tile in the output
BEGIN = gl.constexpr(2)  # the first row that it may store, where groups cut rows
END = gl.constexpr(3)  # the row after the last one that it may store
TILE_N = gl.constexpr(4)  # the number of the tile along the columns
EXPERT = gl.constexpr(5)  # whose bias is added; -1 for rows of no group
HALF = gl.constexpr(6)  # 1 if the tile is half as high
FIELDS = gl.constexpr(7)


@gluon.jit
def _describe(items, slot, FIELD: gl.constexpr, value):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    items.index(slot * FIELDS + FIELD).store(gl.full([1], value, gl.int32, ONE))


@gluon.jit
def field(items, slot, FIELD: gl.constexpr):
    """A number of the item that ``slot`` describes."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(items.index(slot * FIELDS + FIELD).load(ONE), 0)


@gluon.jit
def _end_of(offs, group, groups, begin, tokens):
    # The end of a group, not before its beginning or after the tokens; the tokens of no group
    # follow as one more.
    end = tokens
    if group < groups:
        end = gl.load(offs + group)
    return gl.minimum(gl.maximum(end, begin), tokens)


@gluon.jit
def _load_blocks(
    stages, maps, stage, phase, operands, first, blocks, half, place, out, OUT: gl.constexpr,
    T: gl.constexpr,
):  # fmt: skip
    # Loads k blocks `first` and following, in order; prefetches the tile that they are added to.
    a_s, a_scale_s, b_s, b_scale_s, full, empty = stages
    a_map, a_scale_map, b_map, b_scale_map, a_scale_ld, b_scale_ld = maps
    a_row, a_scale_at, b_row, b_scale_at = operands
    A_COPIES: gl.constexpr = T.a_copies
    B_COPIES: gl.constexpr = T.n // T.b_rows
    B_STEPS: gl.constexpr = T.b_rows // T.b_rows_apart
    SCALE_COPIES: gl.constexpr = T.b_scale_copies
    BYTES: gl.constexpr = (T.m + T.n) * 128 + T.a_scales * 4 + SCALE_COPIES * T.b_scales * 4
    for k in range(blocks):
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), phase)
        if T.halves:
            mbarrier.expect(bar, BYTES - T.m // 2 * 128, pred=half == 1)
            mbarrier.expect(bar, BYTES, pred=half == 0)
        else:
            mbarrier.expect(bar, BYTES)
        for i in gl.static_range(SCALE_COPIES):
            # A copy of a vector starts at a multiple of 16 bytes: of 128x128 scales, k % 4 is used.
            at = b_scale_at + (
                k * b_scale_ld + i * (T.n // SCALE_COPIES) if T.b_block == 1 else k // 4 * 4
            )
            tma.async_copy_global_to_shared(
                b_scale_map, [at], bar, b_scale_s.index(stage * SCALE_COPIES + i)
            )
        tma.async_copy_global_to_shared(
            a_scale_map, [a_scale_at + k * a_scale_ld], bar, a_scale_s.index(stage)
        )
        for i in gl.static_range(A_COPIES):
            needed = half == 0 if i > 0 else True
            tma.async_copy_global_to_shared(
                a_map, [a_row + i * T.a_rows, (first + k) * 128], bar,
                a_s.index(stage * A_COPIES + i), pred=needed,
            )  # fmt: skip
        for i in gl.static_range(B_COPIES):
            target = b_s.index((stage * B_COPIES + i) * B_STEPS)
            if B_STEPS > 1:
                target = target._reinterpret(b_s.dtype, [T.b_rows, 128], b_s.layout)
            tma.async_copy_global_to_shared(
                b_map, [b_row + i * T.b_rows, (first + k) * 128], bar, target
            )
        if OUT.add == "staged":
            row, end, col = place
            out_ptr, N, out_ld = out
            prefetch_tile(out_ptr, row, col, end, N, out_ld, k, blocks, T)
        stage, phase = advance(stage, phase, T.stages)
    return stage, phase


@gluon.jit
def produce(stages, items, maps, work, out, OUT: gl.constexpr, T: gl.constexpr):
    # The producer warp: every k block of every item of this program, in order. Products with
    # 128x128 blocks in B (fprop, dgrad) cut the rows of A at groups; those with 1x128 (wgrad), K.
    _, _, _, _, full, empty = stages
    _, _, _, _, a_scale_ld, b_scale_ld = maps
    offs, groups, tokens, expert_rows, tiles_m, tiles_n, blocks_k, blocks_n = work
    stage = 0
    phase = 1  # waiting for parity 1 of a fresh barrier returns at once
    slot = 0
    item = gl.program_id(0)
    before = 0  # items of earlier groups
    first = 0  # k blocks of earlier groups
    group = 0
    begin = 0
    end = _end_of(offs, 0, groups, 0, tokens)
    CUTS_ROWS: gl.constexpr = T.b_block == 128
    last = groups + 1 if CUTS_ROWS else groups
    while group < last:
        blocks = blocks_k
        # Copies of scales start at multiples of 16 bytes, so tiles at rows that are multiples of 4.
        aligned = begin // 4 * 4
        pairs = 0
        if CUTS_ROWS:
            height = gl.where(end > begin, end - aligned, 0)
            tiles_m = (height + T.m - 1) // T.m
            if T.halves:
                # A row of half tiles at the end: two of them make one item, of a whole tile's time,
                # so that programs of as many items take as long.
                tiles_m = (height + T.m // 2 - 1) // T.m
                pairs = gl.where(height > tiles_m * T.m, (tiles_n + 1) // 2, 0)
        else:
            blocks = (end - begin + 127) // 128
        count = tiles_m * tiles_n + pairs
        if OUT.add is not None:
            count = gl.where(blocks > 0, count, 0)
        if item < before + count:
            within = item - before
            parts = 1
            half = 0
            tile_m, tile_n = tile_of(within, gl.maximum(tiles_m, 1), tiles_n, T.group)
            if T.halves:
                of_pairs = within - tiles_m * tiles_n
                if of_pairs >= 0:
                    half = 1
                    tile_m = tiles_m
                    tile_n = 2 * of_pairs
                    parts = gl.minimum(2, tiles_n - tile_n)
            # Rows of no group, and gradients of a group without tokens, are zeros: the sum of one
            # block that lies beyond the operands, where TMA fills in zeros.
            none = group == groups if CUTS_ROWS else blocks == 0
            blocks = gl.where(none, 1, blocks)
            for part in range(parts):
                col = (tile_n + part) * T.n
                if CUTS_ROWS:
                    row = aligned + tile_m * T.m
                    row_end = end
                    k0 = 0
                    a_row = gl.where(none, tokens, row)
                    a_scale_at = gl.where(none, blocks_k * a_scale_ld, row)
                    b_row = group * expert_rows + col
                    b_scale_at = (group * blocks_n + tile_n + part) * b_scale_ld
                else:
                    a_row = tile_m * T.m
                    row = group * expert_rows + a_row
                    row_end = (group + 1) * expert_rows
                    k0 = gl.where(none, blocks_k, first)
                    a_scale_at = a_row + k0 * a_scale_ld
                    b_row = col
                    b_scale_at = col + k0 * b_scale_ld
                _describe(items, slot, BLOCKS, blocks)
                _describe(items, slot, ROW, row)
                if CUTS_ROWS:
                    _describe(items, slot, BEGIN, begin)
                _describe(items, slot, END, row_end)
                _describe(items, slot, TILE_N, tile_n + part)
                if OUT.bias:
                    _describe(items, slot, EXPERT, gl.where(none, -1, group))
                if T.halves:
                    _describe(items, slot, HALF, half)
                stage, phase = _load_blocks(
                    stages, maps, stage, phase, (a_row, a_scale_at, b_row, b_scale_at), k0, blocks,
                    half, (row, row_end, col), out, OUT, T,
                )  # fmt: skip
                slot = (slot + 1) % SLOTS
            item += gl.num_programs(0)
        else:
            before += count
            first += blocks
            group += 1
            begin = end
            end = _end_of(offs, group, groups, begin, tokens)
    mbarrier.wait(empty.index(stage), phase)
    _describe(items, slot, BLOCKS, 0)
    mbarrier.arrive(full.index(stage), count=1)
