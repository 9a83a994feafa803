"""The tile of a grouped GEMM: the one predicted to be fastest for groups of equal sizes."""

from __future__ import annotations

import functools

from ..formats import BLOCK, ceil_div
from ..gemm.hopper.tile import Tile
from ..gemm.hopper.tiles import TILES, speed_of


@functools.lru_cache(maxsize=4096)
def choose_grouped_tile(
    m: int, n: int, blocks: int, experts: int, b_block: int, sms: int, accumulate: bool = False
) -> Tile:
    """The tile for a product of ``blocks`` k blocks.

    ``b_block`` 128: ``[m, n]``, the rows in ``experts`` groups, each of which ends within a tile. 1:
    ``[experts, m, n]``. Sizes of groups are not known here.
    """
    predicted = {}
    for tile in TILES.values():
        if tile.b_block != b_block or tile.turned:
            continue
        if b_block == BLOCK:
            tiles = m / tile.m + experts / 2
        else:
            tiles = experts * ceil_div(m, tile.m)
        items = tiles * ceil_div(n, tile.n)
        speed = speed_of(tile, accumulate)
        predicted[tile] = items / (sms * tile.programs) * speed.wave(blocks)
    return min(predicted, key=lambda tile: predicted[tile])
