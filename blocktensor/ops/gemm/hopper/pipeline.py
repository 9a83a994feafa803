"""Load operands on the device: the order of tiles, the ring of stages, the producer warp."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...runtime.triton_compat.gluon import async_load


@gluon.jit
def unknown(x):
    # Hides x from the compiler: numbers derived from the result are computed after this point and
    # take no registers before it.
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def tile_of(index, tiles_m, tiles_n, GROUP: gl.constexpr):
    # L2 order: GROUP m tiles share a sweep over n, m fastest inside the group.
    group = index // (GROUP * tiles_n)
    first = group * GROUP
    size = gl.minimum(GROUP, tiles_m - first)
    within = index - group * GROUP * tiles_n
    return first + within % size, within // size


@gluon.jit
def work_of(index, tiles_m, tiles_n, SPLIT: gl.constexpr, GROUP: gl.constexpr):
    # Tile and split of K of item `index`: with SPLIT, every tile is computed in several splits.
    if SPLIT:
        split = index // (tiles_m * tiles_n)
        tile_m, tile_n = tile_of(index - split * (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    else:
        split = 0
        tile_m, tile_n = tile_of(index, tiles_m, tiles_n, GROUP)
    return tile_m, tile_n, split


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    wraps = stage + 1 == STAGES
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def produce(stages, work, maps, OUT: gl.constexpr, T: gl.constexpr):
    # The producer warp: every k block of every item of this program, in order.
    a_s, a_scale_s, b_s, b_scale_s, full, empty = stages
    _, _, tiles_m, tiles_n, blocks_k, splits = work
    a_map, a_scale_map, b_map, b_scale_map, a_scale_ld, b_scale_ld = maps
    A_COPIES: gl.constexpr = T.m // T.a_rows
    SCALE_COPIES: gl.constexpr = T.b_scale_copies
    BYTES: gl.constexpr = (T.m + T.n) * 128 + T.a_scales * 4 + SCALE_COPIES * T.b_scales * 4
    stage = 0
    phase = 1  # waiting for parity 1 of a fresh barrier returns at once
    for item in range(gl.program_id(0), tiles_m * tiles_n * splits, gl.num_programs(0)):
        tile_m, tile_n, split = work_of(item, tiles_m, tiles_n, OUT.split, T.group)
        first = split * blocks_k
        row = tile_m * T.m
        col = tile_n * T.n
        a_scale_at = row + first * a_scale_ld
        b_scale_at = col + first * b_scale_ld if T.b_block == 1 else col // 128 * b_scale_ld
        for k in range(first, first + blocks_k):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, BYTES)
            for i in gl.static_range(SCALE_COPIES):
                # A copy starts at a multiple of 16 bytes: of 128x128 scales, number k % 4 is used.
                at = b_scale_at if T.b_block == 1 else b_scale_at + i * b_scale_ld + k // 4 * 4
                async_load(b_scale_map, [at], bar, b_scale_s.index(stage * SCALE_COPIES + i))
            async_load(a_scale_map, [a_scale_at], bar, a_scale_s.index(stage))
            a_scale_at += a_scale_ld
            if T.b_block == 1:
                b_scale_at += b_scale_ld
            for i in gl.static_range(A_COPIES):
                async_load(
                    a_map, [row + i * T.a_rows, k * 128], bar, a_s.index(stage * A_COPIES + i)
                )
            async_load(b_map, [col, k * 128], bar, b_s.index(stage))
            stage, phase = advance(stage, phase, T.stages)
