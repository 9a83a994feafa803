"""Find the items of a grouped GEMM in the producer warp, and load their operands.

An item is one tile of the output of one expert. The producer finds the items of its program from
the ends of the groups, which are on the device, and describes each in shared memory: consumers do
not look for groups.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..gemm.hopper.epilogue import Output
from ..gemm.hopper.pipeline import advance, tile_of
from ..runtime.triton_compat.gluon import async_load, reinterpret


@dataclass(frozen=True)
class GroupedOutput(Output):
    """The choices by which a grouped GEMM writes its sums.

    Attributes:
        cuts_rows: True if groups are rows of one output (fprop, dgrad); False if each group has its
            own output, and groups cut K (wgrad).
        rank: columns of the operands of the low-rank product that is added: 16, 32 or 64; 0 if
            there is none.
        has_ends: False if one group has all rows, and no ends are read.
    """

    cuts_rows: bool = True
    rank: int = 0
    has_ends: bool = True


SLOTS = gl.constexpr(8)
"""Number of items described at a time. Consumers lag behind by at most one item for each stage and
the current one, so this is more than the stages of any tile."""

BLOCKS = gl.constexpr(0)  # k blocks; 0: no more items
ROW = gl.constexpr(1)  # the first row of the tile in the output
BEGIN = gl.constexpr(2)  # the first row that it may store, where groups cut rows
END = gl.constexpr(3)  # the row after the last one that it may store
TILE_N = gl.constexpr(4)  # the number of the tile along the columns
EXPERT = gl.constexpr(5)  # whose bias is added; -1 for rows of no group
FIRST = gl.constexpr(6)  # the first k block in memory, where groups cut K
FIELDS = gl.constexpr(7)


@gluon.jit
def _describe(items, slot, FIELD: gl.constexpr, value):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    items.index(slot * FIELDS + FIELD).store(gl.full([1], value, gl.int32, ONE))


@gluon.jit
def field(items, slot, FIELD: gl.constexpr):
    """Return a number of the item that ``slot`` describes."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(items.index(slot * FIELDS + FIELD).load(ONE), 0)


@gluon.jit
def _end_of(offs, group, groups, begin, tokens, OUT: gl.constexpr):
    # The end of a group, not before its beginning or after the tokens; the tokens of no group
    # follow as one more.
    end = tokens
    if OUT.has_ends:
        if group < groups:
            end = gl.load(offs + group)
    return gl.minimum(gl.maximum(end, begin), tokens)


@gluon.jit
def _items_of(begin, end, work, OUT: gl.constexpr, T: gl.constexpr):
    # Of the group of tokens [begin, end): how many items, and how many k blocks each; the number of
    # tiles one below the other.
    _, _, _, _, tiles_m, tiles_n, blocks, _ = work
    if OUT.cuts_rows:
        # Copies of scales start at multiples of 16 bytes, so tiles at rows that are multiples of 4.
        tiles_m = gl.where(end > begin, (end - begin // 4 * 4 + T.m - 1) // T.m, 0)
    else:
        blocks = (end - begin + 127) // 128
    return tiles_m * tiles_n, blocks, tiles_m


@gluon.jit
def _is_behind(at, item, work, OUT: gl.constexpr, T: gl.constexpr):
    # True if `item` is not in the group `at`, and there are more groups.
    group, begin, end, before, _ = at
    _, groups, _, _, _, _, _, _ = work
    count, _, _ = _items_of(begin, end, work, OUT, T)
    return (item >= before + count) & (group < (groups + 1 if OUT.cuts_rows else groups))


@gluon.jit
def _next_group(at, work, OUT: gl.constexpr, T: gl.constexpr):
    group, begin, end, before, first = at
    offs, groups, tokens, _, _, _, _, _ = work
    count, blocks, _ = _items_of(begin, end, work, OUT, T)
    after = _end_of(offs, group + 1, groups, end, tokens, OUT)
    return group + 1, end, after, before + count, first + blocks


@gluon.jit
def _load_blocks(
    stages,
    maps,
    stage,
    phase,
    operands,
    first,
    blocks,
    at,
    item,
    work,
    OUT: gl.constexpr,
    T: gl.constexpr,
):
    # Loads k blocks `first` and following, in order.
    # Looks for the group of the next item in between, one group a block: between two items it takes
    # longer than consumers are busy with what is loaded, if the groups are small. In wgrad they are
    # not (an expert's gradient has many tiles), and registers are few.
    a_s, a_scale_s, b_s, b_scale_s, full, empty = stages
    a_map, a_scale_map, b_map, b_scale_map, a_scale_ld, b_scale_ld = maps
    a_row, a_scale_at, b_row, b_scale_at = operands
    A_COPIES: gl.constexpr = T.m // T.a_rows
    SCALE_COPIES: gl.constexpr = T.b_scale_copies
    BYTES: gl.constexpr = (T.m + T.n) * 128 + T.a_scales * 4 + SCALE_COPIES * T.b_scales * 4
    for k in range(blocks):
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(bar, BYTES)
        for i in gl.static_range(SCALE_COPIES):
            # A copy of a vector starts at a multiple of 16 bytes: of 128x128 scales, k % 4 is used.
            scale_at = b_scale_at + (
                k * b_scale_ld if T.b_block == 1 else i * b_scale_ld + (first + k) // 4 * 4
            )
            async_load(b_scale_map, [scale_at], bar, b_scale_s.index(stage * SCALE_COPIES + i))
        async_load(a_scale_map, [a_scale_at + k * a_scale_ld], bar, a_scale_s.index(stage))
        for i in gl.static_range(A_COPIES):
            async_load(
                a_map,
                [a_row + i * T.a_rows, (first + k) * 128],
                bar,
                a_s.index(stage * A_COPIES + i),
            )
        async_load(b_map, [b_row, (first + k) * 128], bar, b_s.index(stage))
        if OUT.cuts_rows:
            if _is_behind(at, item, work, OUT, T):
                at = _next_group(at, work, OUT, T)
        stage, phase = advance(stage, phase, T.stages)
    return stage, phase, at


@gluon.jit
def _low_rank_stages(memory, like, PARTS: gl.constexpr):
    # The memory of an operand in FP8, [n, rows, 128], as operands [rows, rank] of 16 bits. There is
    # room for PARTS of them in place of one; the first is used.
    COUNT: gl.constexpr = memory.shape[0] * PARTS
    RANK: gl.constexpr = 64 // PARTS
    return reinterpret(memory, like.dtype, [COUNT, memory.shape[1], RANK], like.layout)


@gluon.jit
def low_rank_stages(stages, low_rank, OUT: gl.constexpr):
    """Return the memory of the stages as operands of the low-rank product."""
    a_s, _, b_s, _, _, _ = stages
    left_map, right_map = low_rank
    PARTS: gl.constexpr = 64 // OUT.rank
    return _low_rank_stages(a_s, left_map, PARTS), _low_rank_stages(b_s, right_map, PARTS)


@gluon.jit
def _load_low_rank(
    stages, low_rank, stage, phase, left_row, right_row, OUT: gl.constexpr, T: gl.constexpr
):
    # One more stage of an item, after its k blocks: the operands of the low-rank product. TMA fills
    # columns from the rank on with zeros.
    _, _, _, _, full, empty = stages
    left_map, right_map = low_rank
    left_s, right_s = low_rank_stages(stages, low_rank, OUT)
    PARTS: gl.constexpr = 64 // OUT.rank
    COPIES: gl.constexpr = T.m // T.a_rows
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(bar, (T.m + T.n) * OUT.rank * 2)
    for i in gl.static_range(COPIES):
        part = left_s.index((stage * COPIES + i) * PARTS)
        async_load(left_map, [left_row + i * T.a_rows, 0], bar, part)
    async_load(right_map, [right_row, 0], bar, right_s.index(stage * PARTS))
    return advance(stage, phase, T.stages)


@gluon.jit
def produce(stages, items, maps, low_rank, work, OUT: gl.constexpr, T: gl.constexpr):
    # The producer warp: every k block of every item of this program, in order.
    _, _, _, _, full, empty = stages
    _, _, _, _, a_scale_ld, b_scale_ld = maps
    offs, groups, tokens, expert_rows, _, tiles_n, blocks_k, blocks_n = work
    stage = 0
    phase = 1  # waiting for parity 1 of a fresh barrier returns at once
    slot = 0
    item = gl.program_id(0)
    at = (0, 0, _end_of(offs, 0, groups, 0, tokens, OUT), 0, 0)
    last = groups + 1 if OUT.cuts_rows else groups
    while at[0] < last:
        if _is_behind(at, item, work, OUT, T):
            at = _next_group(at, work, OUT, T)
        else:
            # `before`: items of earlier groups; `first`: their k blocks.
            group, begin, end, before, first = at
            _, blocks, tiles_m = _items_of(begin, end, work, OUT, T)
            tile_m, tile_n = tile_of(item - before, gl.maximum(tiles_m, 1), tiles_n, T.group)
            col = tile_n * T.n
            # Rows of no group, and gradients of a group without tokens, are zeros: the sum of one
            # block that lies beyond the operands, where TMA fills in zeros.
            none = group == groups if OUT.cuts_rows else blocks == 0
            blocks = gl.where(none, 1, blocks)
            if OUT.cuts_rows:
                row = begin // 4 * 4 + tile_m * T.m
                row_end = end
                first = 0
                a_row = gl.where(none, 1 << 30, row)
                a_scale_at = gl.where(none, blocks_k * a_scale_ld, row)
                b_row = group * expert_rows + col
                b_scale_at = (group * blocks_n + col // 128) * b_scale_ld
            else:
                a_row = tile_m * T.m
                row = group * expert_rows + a_row
                row_end = (group + 1) * expert_rows
                first = gl.where(none, blocks_k, first)
                a_scale_at = a_row + first * a_scale_ld
                b_row = col
                b_scale_at = col + first * b_scale_ld
                if T.b_block == 128:
                    # Beyond all rows of scales: one within them may be nan.
                    b_scale_at = gl.where(none, tiles_n * T.n, col) // 128 * b_scale_ld
            _describe(items, slot, BLOCKS, blocks)
            _describe(items, slot, ROW, row)
            if OUT.cuts_rows:
                _describe(items, slot, BEGIN, begin)
            elif T.b_block == 128:
                _describe(items, slot, FIRST, first)
            _describe(items, slot, END, row_end)
            _describe(items, slot, TILE_N, tile_n)
            if OUT.bias:
                _describe(items, slot, EXPERT, gl.where(none, -1, group))
            item += gl.num_programs(0)
            stage, phase, at = _load_blocks(
                stages, maps, stage, phase, (a_row, a_scale_at, b_row, b_scale_at), first, blocks,
                at, item, work, OUT, T,
            )  # fmt: skip
            if OUT.rank:
                stage, phase = _load_low_rank(stages, low_rank, stage, phase, a_row, b_row, OUT, T)
            slot = (slot + 1) % SLOTS
    mbarrier.wait(empty.index(stage), phase)
    _describe(items, slot, BLOCKS, 0)
    mbarrier.arrive(full.index(stage), count=1)
