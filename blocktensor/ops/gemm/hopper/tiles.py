"""Choose the tile of a GEMM that is predicted to be fastest for a shape.

The prediction for a tile is two fitted lines over its k blocks: the time of each of several waves,
and the time of a single wave, which is shorter since the GPU is cool and its memory idle.
``python -m benchmarks tiles`` measures again and writes the part of its card in ``tiles.json``.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from ...devices import Card
from ...formats import BLOCK, ceil_div, padded_rows
from .tile import Tile

FILE = Path(__file__).with_name("tiles.json")

TILES = {
    tile.name: tile
    for tile in (
        Tile("square 256x128", BLOCK, rows=2, cols=1, width=128, depth=1, group=4),
        Tile("square 192x128", BLOCK, rows=1, cols=1, width=128, depth=1, warpgroups=3, group=4,
             registers=160),
        Tile("square 128x128", BLOCK, rows=1, cols=1, width=128, depth=1, stages=6, group=4),
        Tile("square 64x128", BLOCK, rows=1, cols=1, width=128, depth=1, warpgroups=1, buffers=2,
             programs=2),
        Tile("rows 256x128", 1, rows=2, cols=2, width=64, depth=2),
        Tile("rows 64x128", 1, rows=1, cols=2, width=64, depth=2, warpgroups=1, buffers=2,
             programs=2),
    )
}  # fmt: skip

CUBLAS = {BLOCK: "cublas square", 1: "cublas rows"}
"""The names of cuBLAS's kernels in tiles.json, by the rows of B that share a scale."""

CUBLAS_MARGIN = 0.97
CUBLAS_SAVES_US = 2.0
"""cuBLAS is chosen only if it is predicted to take less than this share of our time, and to save
this many microseconds: its call takes 25 to 40 us more on the host than ours."""


MOST_SPLITS = 16
SUM_US = 1.4
"""Microseconds of the launch that sums splits."""

SPLITS_MARGIN = 0.9
"""K is split only if this is predicted to take less than this share of the time."""

SUMMED_PER_US = 1.2e6
"""Numbers from L2 that the launch which sums splits adds in a microsecond."""

PROGRAM_US = 250.0
"""Least microseconds of a program if an SM runs several programs one after the other.

A persistent program waits while another stream's kernels hold its SM, and then does its whole share
alone: during a collective on 24 SMs such matmuls take 1.8 times as long, with programs of this
length 1.3 times. A change of programs takes 5 us, which is hidden in long matmuls.
"""


@dataclass(frozen=True)
class Speed:
    """Microseconds of a kernel per wave and k block, per wave, and per launch.

    ``lone_``: of a single wave, per k block of each tile of an SM, and per launch.
    """

    m: int
    n: int
    programs: int
    block_us: float
    wave_us: float
    launch_us: float
    lone_block_us: float
    lone_us: float

    def waves(self, m: int, n: int, sms: int, splits: int = 1) -> int:
        """Return the number of waves of an ``[m, n]`` output, with ``programs`` tiles on an SM."""
        return ceil_div(self._tiles(m, n) * splits, sms * self.programs)

    def an_sm(self, m: int, n: int, sms: int, splits: int = 1) -> int:
        """Return the most tiles that one SM computes."""
        return ceil_div(self._tiles(m, n) * splits, sms)

    def wave(self, blocks: int) -> float:
        """Return microseconds of one of several waves, over ``blocks`` k blocks."""
        return blocks * self.block_us + self.wave_us

    def _tiles(self, m: int, n: int) -> int:
        return ceil_div(m, self.m) * ceil_div(n, self.n)

    def microseconds(self, m: int, n: int, blocks: int, sms: int, splits: int = 1) -> float:
        """Predict the time of an ``[m, n]`` output over ``blocks`` k blocks, cut in ``splits``."""
        blocks //= splits
        waves = self.waves(m, n, sms, splits)
        if waves == 1:
            return self.an_sm(m, n, sms, splits) * blocks * self.lone_block_us + self.lone_us
        return waves * self.wave(blocks) + self.launch_us


@functools.cache
def speeds(card: str) -> dict[str, Speed]:
    """Return speeds measured on a card, by the name of a tile or of cuBLAS's kernel."""
    known = json.loads(FILE.read_text())[card]["speeds"]
    return {name: Speed(**fields) for name, fields in known.items()}


def possible_splits(blocks: int) -> list[int]:
    """Return the numbers of equal splits of ``blocks`` k blocks, each of at least 4."""
    return [
        p for p in range(1, MOST_SPLITS + 1) if blocks % p == 0 and (p == 1 or blocks // p >= 4)
    ]


@functools.lru_cache(maxsize=4096)
def choose_tile(
    m: int,
    n: int,
    blocks: int,
    b_block: int,
    card: Card,
    plain: bool = True,
    splits_k: bool = True,
) -> tuple[Tile, int, float]:
    """Return the tile for a shape, the number of splits of K, and predicted microseconds.

    It is the same for all m that round up to the same multiple of ``ROW_STEP``.

    ``plain`` is False for bias and masked stores together, for which tiles of two row waves have no
    registers. ``splits_k`` is False if the bits of a row must not depend on ``m``.
    """
    m = padded_rows(m)
    predicted = {}
    for tile in TILES.values():
        if tile.b_block != b_block or not (plain or tile.rows == 1):
            continue
        speed = speeds(card.name)[tile.name]
        for splits in possible_splits(blocks) if splits_k else [1]:
            us = speed.microseconds(m, n, blocks, card.sms, splits)
            if splits > 1:
                us = (us + SUM_US + splits * m * n / SUMMED_PER_US) / SPLITS_MARGIN
            predicted[tile, splits] = us
    (tile, splits), us = min(predicted.items(), key=lambda item: item[1])
    return tile, splits, us


def programs_for(tile: Tile, items: int, blocks: int, card: Card) -> int:
    """Return the number of programs that share ``items`` tiles over ``blocks`` k blocks each."""
    at_once = card.sms * tile.programs
    us = ceil_div(items, at_once) * speeds(card.name)[tile.name].wave(blocks)
    return programs_in_turn(items, at_once, us)


def programs_in_turn(items: int, at_once: int, us: float) -> int:
    """Return the number of programs for ``items`` of ``us`` microseconds, ``at_once`` at a time.

    There are more than run at once if each then takes :data:`PROGRAM_US` or longer.
    """
    waves = ceil_div(items, at_once)
    rounds = max(1, int(us / PROGRAM_US))
    return min(items, ceil_div(waves, ceil_div(waves, rounds)) * at_once)


def cublas_is_faster(m: int, n: int, blocks: int, b_block: int, card: Card) -> bool:
    """Return whether cuBLAS is predicted to be faster than the best tile."""
    m = padded_rows(m)
    ours = choose_tile(m, n, blocks, b_block, card)[2]
    theirs = speeds(card.name)[CUBLAS[b_block]].microseconds(m, n, blocks, card.sms)
    return theirs < min(CUBLAS_MARGIN * ours, ours - CUBLAS_SAVES_US)
