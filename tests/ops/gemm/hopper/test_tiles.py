"""The tiles, and the prediction that chooses among them."""

from __future__ import annotations

import json

import pytest

from blocktensor.ops.devices import H200
from blocktensor.ops.gemm.hopper import tiles
from blocktensor.ops.gemm.hopper.tiles import (
    TILES,
    Speed,
    choose_tile,
    cublas_is_faster,
    possible_splits,
    speeds,
)

SMS = H200.sms


@pytest.mark.parametrize("name", TILES)
def test_what_a_warpgroup_covers_makes_up_the_tile(name: str) -> None:
    tile = TILES[name]
    assert name == f"{'square' if tile.b_block == 128 else 'rows'} {tile.m}x{tile.n}"
    assert 64 * tile.width * tile.products * tile.warpgroups == tile.m * tile.n
    assert tile.m % tile.a_rows == 0 and tile.n & (tile.n - 1) == 0
    assert tile.a_scales >= tile.m and tile.a_scales & (tile.a_scales - 1) == 0
    if tile.b_block == 1:
        assert tile.b_scales * tile.b_scale_copies >= tile.n


@pytest.mark.parametrize("card", ["H200", "H100"])
def test_the_file_knows_every_kernel(card: str) -> None:
    assert set(speeds(card)) == {*TILES, *tiles.CUBLAS.values()}
    for name, tile in TILES.items():
        assert (speeds(card)[name].m, speeds(card)[name].n) == (tile.m, tile.n)
        assert speeds(card)[name].programs == tile.programs
    source = json.loads(tiles.FILE.read_text())[card]
    assert source["command"] == "python -m benchmarks tiles"
    assert card in source["gpu"]


@pytest.mark.parametrize("n", [512, 2048, 6144])
@pytest.mark.parametrize("b_block", [128, 1])
def test_the_choice_is_the_same_within_a_step_of_rows(n: int, b_block: int) -> None:
    """Recorded calls and unrecorded ones have the same bits."""
    for first in (0, 64, 256, 4096):
        chosen = {choose_tile(first + row, n, 56, b_block, H200) for row in range(1, 65)}
        assert len(chosen) == 1
        faster = {cublas_is_faster(first + row, n, 56, b_block, H200) for row in range(1, 65)}
        assert len(faster) == 1


def test_a_wave_more_takes_its_time() -> None:
    speed = Speed(
        m=128,
        n=128,
        programs=1,
        block_us=0.5,
        wave_us=2.0,
        launch_us=3.0,
        lone_block_us=0.4,
        lone_us=4.0,
    )
    assert speed.waves(128 * 12, 128 * 11, SMS) == 1
    assert speed.waves(128 * 12 + 1, 128 * 11, SMS) == 2
    assert speed.microseconds(128, 128, 8, SMS) == 0.4 * 8 + 4
    assert speed.microseconds(128 * 133, 128, 8, SMS) == 2 * (0.5 * 8 + 2) + 3
    assert speed.microseconds(128 * 66, 128, 8, SMS, splits=2) == 0.4 * 4 + 4
    assert speed.microseconds(128 * 67, 128, 8, SMS, splits=2) == 2 * (0.5 * 4 + 2) + 3
    # A program beside another counts before the wave is full
    speed = Speed(128, 128, 2, 1.0, 1.0, 1.0, lone_block_us=0.5, lone_us=3.0)
    assert speed.waves(128 * 264, 128, SMS) == 1
    assert speed.microseconds(128 * 132, 128, 8, SMS) == 0.5 * 8 + 3
    assert speed.microseconds(128 * 133, 128, 8, SMS) == 2 * 0.5 * 8 + 3
    assert speed.microseconds(128 * 265, 128, 8, SMS) == 2 * (8 + 1) + 1


@pytest.mark.parametrize(
    ("shape", "b_block", "expected"),
    [
        ((4096, 18432, 56), 128, "square 256x128"),
        ((512, 2048, 16), 128, "square 64x128"),
        ((4096, 4096, 32), 1, "rows 256x128"),
        ((512, 2048, 32), 1, "rows 64x128"),
    ],
)
def test_the_choice(shape: tuple[int, int, int], b_block: int, expected: str) -> None:
    tile, splits, predicted = choose_tile(*shape, b_block, H200)
    assert (tile.name, splits) == (expected, 1)
    others = [speeds("H200")[n] for n, t in TILES.items() if t.b_block == b_block]
    assert predicted == min(s.microseconds(*shape, SMS) for s in others)


@pytest.mark.parametrize(
    ("size", "blocks", "factor", "saved", "faster"),
    [
        (4096, 32, 0.96, 0.0, True),
        (4096, 32, 0.98, 0.0, False),
        (512, 16, 1.0, 1.9, False),  # a microsecond is not worth its host time
        (512, 16, 1.0, 2.1, True),
    ],
)
def test_cublas_is_preferred_where_it_is_clearly_faster(
    size: int,
    blocks: int,
    factor: float,
    saved: float,
    faster: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    us = factor * choose_tile(size, size, blocks, 1, H200)[2] - saved
    other = Speed(4096, 4096, 1, 0.0, 0.0, 0.0, 0.0, us)
    known = {**speeds("H200"), tiles.CUBLAS[1]: other}
    monkeypatch.setattr(tiles, "speeds", lambda card: known)
    assert tiles.cublas_is_faster(size, size, blocks, 1, H200) is faster


def test_few_tiles_are_made_in_parts() -> None:
    assert possible_splits(56) == [1, 2, 4, 7, 8, 14]
    assert possible_splits(16) == [1, 2, 4]
    assert possible_splits(86) == [1, 2]
    assert possible_splits(3) == [1]
    tile, splits, predicted = choose_tile(64, 2048, 56, 128, H200)
    assert (tile.name, splits) == ("square 64x128", 8)
    whole = min(speeds("H200")[n].microseconds(64, 2048, 56, SMS) for n in TILES if "square" in n)
    assert predicted < whole


@pytest.mark.parametrize("name", TILES)
def test_programs_of_long_products_take_turns(name: str) -> None:
    tile, speed = TILES[name], speeds("H200")[name]
    at_once = SMS * tile.programs
    assert tiles.programs_for(tile, at_once - 1, 64, H200) == at_once - 1
    for blocks in (8, 64, 500):
        wave_us = blocks * speed.block_us + speed.wave_us
        for waves in (1, 2, 7, 30, 200):
            for items in (at_once * waves, at_once * (waves - 1) + 1):
                programs = tiles.programs_for(tile, items, blocks, H200)
                assert programs == items or programs % at_once == 0
                each = -(-items // programs)
                assert each * wave_us >= tiles.PROGRAM_US or programs <= at_once
                # and none works twice as long but where its waves or the turns are few
                assert each * wave_us < 2 * tiles.PROGRAM_US or each == 1
