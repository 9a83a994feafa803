"""The tiles there are, and which one a shape gets: the one predicted to be fastest.

The prediction is two lines per tile, fitted to measurements: programs work in waves, and a wave
takes a time per k block and a time for the rest; a single wave, which leaves the GPU cool and its
memory idle, takes less. ``python -m benchmarks tiles`` measures and writes ``tiles.json`` anew.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from ...formats import BLOCK, ceil_div
from .tile import Tile

FILE = Path(__file__).with_name("tiles.json")

TILES = {
    tile.name: tile
    for tile in (
        Tile("square 256x128", BLOCK, rows=2, cols=1, width=128, depth=1, group=16),
        Tile("square 192x128", BLOCK, rows=1, cols=1, width=128, depth=1, warpgroups=3, group=8,
             registers=160),
        Tile("square 128x128", BLOCK, rows=1, cols=1, width=128, depth=1, stages=6, group=16),
        Tile("square 64x128", BLOCK, rows=1, cols=1, width=128, depth=1, warpgroups=1, buffers=2,
             programs=2),
        Tile("rows 256x128", 1, rows=2, cols=2, width=64, depth=2),
        Tile("rows 128x192", 1, rows=2, cols=1, width=96, depth=2, split="n", buffers=6, group=16),
        Tile("rows 192x128", 1, rows=2, cols=1, width=96, depth=2, split="n", buffers=6, group=16,
             turned=True),
        Tile("rows 64x128", 1, rows=1, cols=2, width=64, depth=2, warpgroups=1, buffers=2,
             programs=2),
    )
}  # fmt: skip

CUBLAS = {BLOCK: "cublas square", 1: "cublas rows"}
"""What tiles.json calls cuBLAS's kernels, by the rows of B that share a scale."""

ADDED = " +="
"""What tiles.json adds to the name of a tile whose sums are added to an fp32 output."""

CUBLAS_MARGIN = 0.97
CUBLAS_SAVES_US = 2.0
"""cuBLAS is preferred only where it is predicted to take less than this of our time, and to save
microseconds that count: a call of it takes 25 to 40 us more on the host than one of ours."""


MOST_PARTS = 16
SUM_US = 1.4
"""A launch that sums parts, microseconds."""

PARTS_MARGIN = 0.9
"""Parts are made only where they are predicted to take less than this of the time."""

SUMMED_PER_US = 1.2e6
"""Numbers that it sums in a microsecond, out of L2."""

PROGRAM_US = 250.0
"""The least that programs work where an SM runs several of them one after the other.

One that works until the product is done waits, where another stream's kernels hold its SM, and then
does all of its share alone: beside a collective on 24 SMs such products take 1.8 times as long, in
programs of this length 1.3 times. A change of programs costs 5 us, hidden in products this long.
"""


@dataclass(frozen=True)
class Speed:
    """How long a kernel takes: microseconds per wave and k block, per wave, and per launch.

    Where all tiles are under way at once: microseconds per k block of the tiles of an SM, and per
    launch (``lone_``).
    """

    m: int
    n: int
    programs: int
    block_us: float
    wave_us: float
    launch_us: float
    lone_block_us: float
    lone_us: float

    def waves(self, m: int, n: int, sms: int, parts: int = 1) -> int:
        """Times that every SM works, where an SM holds ``programs`` tiles of ``m`` x ``n``."""
        return ceil_div(self._tiles(m, n) * parts, sms * self.programs)

    def an_sm(self, m: int, n: int, sms: int, parts: int = 1) -> int:
        """The most tiles that fall to one SM."""
        return ceil_div(self._tiles(m, n) * parts, sms)

    def wave(self, blocks: int) -> float:
        """Microseconds of a wave over ``blocks`` k blocks, among others."""
        return blocks * self.block_us + self.wave_us

    def _tiles(self, m: int, n: int) -> int:
        return ceil_div(m, self.m) * ceil_div(n, self.n)

    def microseconds(self, m: int, n: int, blocks: int, sms: int, parts: int = 1) -> float:
        """Predicted time of an ``[m, n]`` output over ``blocks`` k blocks, in ``parts`` of them."""
        blocks //= parts
        waves = self.waves(m, n, sms, parts)
        if waves == 1:
            return self.an_sm(m, n, sms, parts) * blocks * self.lone_block_us + self.lone_us
        return waves * self.wave(blocks) + self.launch_us


@functools.cache
def speeds() -> dict[str, Speed]:
    """Measured speeds, by the name of a tile or of cuBLAS's kernel."""
    return {
        name: Speed(**fields) for name, fields in json.loads(FILE.read_text())["speeds"].items()
    }


def _speed(tile: Tile, accumulate: bool) -> Speed:
    speed = speeds()[tile.name]
    return speeds().get(tile.name + ADDED, speed) if accumulate else speed


def possible_parts(blocks: int) -> list[int]:
    """Into how many equal parts ``blocks`` k blocks can be cut, a few blocks each."""
    return [p for p in range(1, MOST_PARTS + 1) if blocks % p == 0 and (p == 1 or blocks // p >= 4)]


@functools.lru_cache(maxsize=4096)
def choose_tile(
    m: int,
    n: int,
    blocks: int,
    b_block: int,
    sms: int,
    plain: bool = True,
    accumulate: bool = False,
    turned: bool = True,
) -> tuple[Tile, int, float]:
    """The tile for a shape, the parts of K to make it in, and the predicted time in microseconds.

    ``accumulate``: sums are added to an output. Not ``plain``: bias and masked stores together, for
    which two row waves leave no registers. Not ``turned``: a bias, which turned tiles cannot add.
    """
    predicted = {}
    for tile in TILES.values():
        if tile.b_block != b_block or not (plain or tile.rows == 1 or b_block == 1):
            continue
        if tile.turned and not turned:
            continue
        speed = _speed(tile, accumulate)
        for parts in [1] if tile.turned else possible_parts(blocks):
            us = speed.microseconds(m, n, blocks, sms, parts)
            if parts > 1:
                us = (us + SUM_US + parts * m * n / SUMMED_PER_US) / PARTS_MARGIN
            predicted[tile, parts] = us
    (tile, parts), us = min(predicted.items(), key=lambda item: item[1])
    return tile, parts, us


def programs_for(tile: Tile, items: int, blocks: int, sms: int, accumulate: bool = False) -> int:
    """How many programs share ``items`` tiles over ``blocks`` k blocks each."""
    at_once = sms * tile.programs
    if items <= at_once:
        return items
    waves = ceil_div(items, at_once)
    rounds = int(waves * _speed(tile, accumulate).wave(blocks) / PROGRAM_US)
    if rounds < 2:
        return at_once
    return min(items, ceil_div(waves, ceil_div(waves, rounds)) * at_once)


def cublas_is_faster(m: int, n: int, blocks: int, b_block: int, sms: int) -> bool:
    """Whether cuBLAS is predicted to be faster than the best tile."""
    ours = choose_tile(m, n, blocks, b_block, sms)[2]
    theirs = speeds()[CUBLAS[b_block]].microseconds(m, n, blocks, sms)
    return theirs < min(CUBLAS_MARGIN * ours, ours - CUBLAS_SAVES_US)
