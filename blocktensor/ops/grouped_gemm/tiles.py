"""Choose the tile of a grouped GEMM that is predicted to be fastest for groups of equal sizes.

The host does not know the sizes of groups: it assumes half a tile of waste in each.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from ..formats import BLOCK, ceil_div
from ..gemm.hopper.tile import Tile
from ..gemm.hopper.tiles import TILES, programs_in_turn


@dataclass(frozen=True)
class GroupedTile:
    """A tile and its measured speed.

    Fitted on an H200 (2026-11-22): fprop of 8 groups over K 7168 and of 128 over 2048 and 768;
    wgrad of 4 and 8 groups of 4,352 to 8,160 tokens, and of 32 to 128 of 495 to 1,020.

    Attributes:
        tile: how a program computes an item.
        block_us: microseconds of an item per k block.
        item_us: microseconds of an item for everything else.
    """

    tile: Tile
    block_us: float
    item_us: float

    def microseconds(self, blocks: float) -> float:
        """Return the time of one item over ``blocks`` k blocks."""
        return blocks * self.block_us + self.item_us


SQUARES = (
    GroupedTile(replace(TILES["square 256x128"], name="square 128x256", split="n"), 0.88, 1.4),
    GroupedTile(TILES["square 128x128"], 0.50, 0.9),
    GroupedTile(TILES["square 64x128"], 0.61, 1.1),
)
"""Tiles for B in 128x128 blocks: fprop and dgrad. Few rows waste least at the ends of groups.
"""

WGRAD_SQUARES = (
    GroupedTile(TILES["square 256x128"], 0.905, 0.8),
    GroupedTile(SQUARES[0].tile, 0.884, 0.85),
    GroupedTile(TILES["square 128x128"], 0.48, 0.4),
    GroupedTile(TILES["square 64x128"], 0.657, 0.0),
)
"""Tiles of wgrad with B in 128x128 blocks."""

ROWS = (
    GroupedTile(TILES["rows 256x128"], 1.14, 1.16),
    GroupedTile(TILES["rows 64x128"], 0.692, 0.35),
)
"""Tiles for 1x128 blocks on both sides: wgrad."""


_MANY = 16
"""From this number of experts on, several wgrad programs per SM (up to 10) are up to 7% slower than
one: each program iterates over all earlier groups. With 8 experts they are 1% to 4% faster."""


@functools.lru_cache(maxsize=4096)
def choose_gemm_tile(
    tokens: int, n: int, blocks: int, experts: int, sms: int, plain: bool
) -> tuple[Tile, int]:
    """Return the tile for ``[tokens, n]`` in ``experts`` groups over ``blocks``, and the programs.

    A low-rank product counts as a block. ``plain`` is False with a bias, and for a low-rank product
    together with masked stores: tiles of two row waves have too few registers for them.
    """
    predicted = {}
    for candidate in SQUARES:
        tile = candidate.tile
        if not plain and tile.rows > 1:
            continue
        rows = tokens / tile.m + min(experts, tokens) / 2
        items = math.ceil(rows) * ceil_div(n, tile.n)
        predicted[tile] = _plan(candidate, items, blocks, sms)
    return _best(predicted)


@functools.lru_cache(maxsize=4096)
def choose_wgrad_tile(
    n: int, k: int, tokens: int, experts: int, b_block: int, sms: int
) -> tuple[Tile, int]:
    """Return the tile for ``[experts, n, k]`` contracted over ``tokens``, and the programs."""
    tiles = WGRAD_SQUARES if b_block == BLOCK else ROWS
    blocks = tokens / experts / BLOCK + 0.5
    predicted = {}
    for candidate in tiles:
        tile = candidate.tile
        if not stores_fit(tile, n):
            continue
        items = experts * ceil_div(n, tile.m) * ceil_div(k, tile.n)
        us, programs = _plan(candidate, items, blocks, sms)
        if experts >= _MANY:
            programs = min(programs, sms * tile.programs)
        predicted[tile] = us, programs
    return _best(predicted)


def stores_fit(tile: Tile, n: int) -> bool:
    """Return whether a tile has the registers to store gradients of ``n`` rows of experts.

    Rows at the edge of an expert are stored with masks.
    """
    return tile.m <= BLOCK or n % tile.m == 0


def _plan(found: GroupedTile, items: int, blocks: float, sms: int) -> tuple[float, int]:
    """Return predicted microseconds, and the number of programs."""
    at_once = sms * found.tile.programs
    us = ceil_div(items, at_once) * found.microseconds(blocks)
    return us, programs_in_turn(items, at_once, us)


def _best(predicted: dict[Tile, tuple[float, int]]) -> tuple[Tile, int]:
    tile = min(predicted, key=lambda tile: predicted[tile][0])
    return tile, predicted[tile][1]
