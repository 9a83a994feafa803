"""GEMMs compile for sm_90 without a GPU: every tile on Hopper to the code that is meant."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktensor.ops.devices import H200
from blocktensor.ops.formats import BLOCK, Quantized, group_blocks
from tests.support.numeric import DTYPES

pytest.importorskip("triton")

from blocktensor.ops.gemm import triton_gemm
from blocktensor.ops.gemm.hopper.launch import plan_gemm
from blocktensor.ops.gemm.hopper.tile import Tile
from blocktensor.ops.gemm.hopper.tiles import TILES, choose_tile
from blocktensor.ops.grouped_gemm import tiles
from blocktensor.ops.grouped_gemm import triton_gemm as triton_grouped
from blocktensor.ops.grouped_gemm.hopper_launch import plan_grouped_gemm, plan_grouped_wgrad
from blocktensor.ops.runtime.launch import Launch
from tests.support import sm90
from tests.support.sm90 import Launches, Resources, cast_like, compile_for_sm90, like

BF16, FP16, FP32 = DTYPES
launches = sm90.launches


def assert_fits(tile: Tile, code: Resources) -> None:
    assert code.spills_nothing_of_a_gemm
    assert code.shared_bytes * tile.programs <= 227 * 1024


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of tiles, with the options of a product that they compute.

    fp16 takes the registers of bf16, and a whole product in fp32 those of a part of one.
    """
    yield from ((name, {"dtype": dtype}) for name in [*TILES][:1] for dtype in (FP16, FP32))
    for name, tile in TILES.items():
        yield name, {"dtype": BF16}
        yield name, {"dtype": BF16, "n": 2111}  # rows that TMA cannot address
        yield name, {"dtype": FP32, "parts": 7}
        if tile.b_block == 128:
            yield name, {"dtype": BF16, "bias": True}
            if tile.rows == 1:
                yield name, {"dtype": BF16, "bias": True, "n": 2111}


@pytest.mark.parametrize(("name", "options"), [*variants()], ids=str)
def test_products(name: str, options: dict[str, Any]) -> None:
    tile, n, parts = TILES[name], options.get("n", 2112), options.get("parts", 1)
    a, b = cast_like(4096, 7168), cast_like(n, 7168, rows=tile.b_block)
    out, bias = like(4096 * parts, n, dtype=options["dtype"]), options.get("bias")
    code = compile_for_sm90(plan_gemm(a, b, like(n) if bias else None, out, tile, parts))
    assert_fits(tile, code)
    # What 384 or 512 threads leave each; the consumers then take more from the producer
    assert code.registers == (168 if tile.warpgroups == 2 else 128)
    # One wait a product: ptxas serialises products that it cannot keep under way, each with a wait
    # of its own. The first k block of a tile is code of its own where B has 128x128 blocks.
    products = tile.products * tile.warpgroups * (2 if tile.b_block == 128 else 1)
    assert code.sass.count("WARPGROUP.DEPBAR") == products
    assert code.sass.count(f"QGMMA.64x{tile.width}x32") == 4 * products
    assert code.sass.count("QGMMA") == 4 * products


def test_bias_and_masked_stores_get_a_tile_with_registers_to_spare() -> None:
    assert choose_tile(4096, 18431, 56, 128, H200, plain=True)[0].rows == 2
    assert choose_tile(4096, 18431, 56, 128, H200, plain=False)[0].rows == 1


def gemms_in_triton() -> Iterator[tuple[Quantized, Quantized, Tensor | None, torch.dtype]]:
    for m, n, k, a_rows, b_rows, dtype in (
        (4096, 7168, 2048, 1, 128, BF16),
        (4096, 7168, 2048, 1, 1, FP32),
        (4096, 576, 10944, 1, 128, BF16),
        (4096, 576, 10944, 128, 1, FP32),
        (4096, 2112, 7168, 128, 128, FP16),
        (300, 130, 130, 1, 128, BF16),
        (300, 129, 1, 1, 1, FP32),
        (64, 576, 10944, 1, 128, BF16),
        (64, 7168, 2048, 1, 1, FP32),
        (3, 130, 129, 128, 1, BF16),
        (1, 7168, 2048, 1, 128, BF16),
        (1, 1, 1, 1, 1, FP32),
    ):
        yield cast_like(m, k, rows=a_rows), cast_like(n, k, rows=b_rows), None, dtype
    for m, n, k in ((4096, 7168, 2048), (3, 130, 129)):
        yield cast_like(m, k), cast_like(n, k, rows=128), like(n), BF16


@pytest.mark.parametrize(("a", "b", "bias", "dtype"), [*gemms_in_triton()], ids=range(14))
def test_in_triton(
    a: Quantized, b: Quantized, bias: Tensor | None, dtype: torch.dtype, launches: Launches
) -> None:
    assert launches.compile(lambda: triton_gemm.gemm(a, b, bias, dtype)) == 1


EXPERTS, TOKENS, N, K = 8, 4001, 2816, 2048
COLUMNS = group_blocks(TOKENS, EXPERTS) * BLOCK
OFFS = like(EXPERTS, dtype=torch.int32)


def fprops() -> Iterator[tuple[Tile, torch.dtype, bool, int]]:
    """All in bf16; in fp32 those that take the fewest registers and the most."""
    for found, bias, n in itertools.product(tiles.SQUARES, (False, True), (N, 130)):
        if bias and found.tile.rows > 1:
            continue  # never chosen: no registers are left
        yield found.tile, BF16, bias, n
        if bias == (n != N):
            yield found.tile, FP32, bias, n


@pytest.mark.parametrize(("tile", "dtype", "bias", "n"), [*fprops()], ids=lambda x: str(x)[:40])
def test_grouped_fprop(tile: Tile, dtype: torch.dtype, bias: bool, n: int) -> None:
    a, b, out = (
        cast_like(TOKENS, K),
        cast_like(EXPERTS, n, K, rows=128),
        like(TOKENS, n, dtype=dtype),
    )
    added = like(EXPERTS, n) if bias else None
    assert_fits(tile, compile_for_sm90(plan_grouped_gemm(a, b, OFFS, added, out, tile, 132)))


def low_rank_fprops() -> Iterator[tuple[Tile, int, bool, int]]:
    for found, rank, bias, n in itertools.product(
        tiles.SQUARES, (8, 16, 32, 64), (False, True), (N, 130)
    ):
        plain = not bias and n % 8 == 0
        if plain or (found.tile.rows == 1 and rank == 16):
            yield found.tile, rank, bias, n


@pytest.mark.parametrize(
    ("tile", "rank", "bias", "n"), [*low_rank_fprops()], ids=lambda x: str(x)[:40]
)
def test_grouped_fprop_with_a_low_rank_product(tile: Tile, rank: int, bias: bool, n: int) -> None:
    """The kernel has the tensor core instructions of the padded rank, and no waits among them."""
    a, b, out = cast_like(TOKENS, K), cast_like(EXPERTS, n, K, rows=128), like(TOKENS, n)
    added = like(EXPERTS, n) if bias else None
    low_rank = like(TOKENS, rank), like(EXPERTS, n, rank)
    code = compile_for_sm90(plan_grouped_gemm(a, b, OFFS, added, out, tile, 132, *low_rank))
    assert_fits(tile, code)
    products = tile.products * tile.warpgroups
    steps = max(1, rank // 16)
    assert code.sass.count(f"HGMMA.64x{tile.width}x16.F32.BF16") == steps * products
    assert code.sass.count("HGMMA") == steps * products
    assert code.sass.count("WARPGROUP.DEPBAR") == 3 * products  # 2: first and later k blocks


def test_masked_stores_of_a_low_rank_product_get_a_tile_with_registers_to_spare() -> None:
    sizes = 16384, 2048, 17, 8, 132
    assert tiles.choose_gemm_tile(*sizes, True)[0].rows == 2
    assert tiles.choose_gemm_tile(*sizes, False)[0].rows == 1


def wgrads() -> Iterator[tuple[Tile, torch.dtype, int, int]]:
    """All shapes in bf16; in fp32 those that are stored by TMA and by masked stores."""
    shapes = ((N, K), (N, 130), (2880, 2880), (1408, K))
    every_tile = tiles.ROWS + tiles.WGRAD_SQUARES
    for found, (n, k) in itertools.product(every_tile, shapes):
        if tiles.stores_fit(found.tile, n):
            yield found.tile, BF16, n, k
            if n == N:
                yield found.tile, FP32, n, k


@pytest.mark.parametrize(("tile", "dtype", "n", "k"), [*wgrads()], ids=lambda x: str(x)[:40])
def test_grouped_wgrad(tile: Tile, dtype: torch.dtype, n: int, k: int) -> None:
    a, b = cast_like(n, COLUMNS), cast_like(k, COLUMNS, rows=tile.b_block)
    out = like(EXPERTS, n, k, dtype=dtype)
    assert_fits(tile, compile_for_sm90(plan_grouped_wgrad(a, b, OFFS, TOKENS, out, tile, 132)))


def grouped_in_triton() -> Iterator[Launch]:
    for dtype in (BF16, FP32):
        out = like(TOKENS, N, dtype=dtype)
        x, w = cast_like(TOKENS, K), cast_like(EXPERTS, N, K, rows=128)
        yield triton_grouped.plan_grouped_gemm(x, w, OFFS, None, out)
        low_rank = like(TOKENS, 16), like(EXPERTS, N, 16)
        yield triton_grouped.plan_grouped_gemm(x, w, OFFS, None, out, *low_rank)
        dw = like(EXPERTS, N, K, dtype=dtype)
        for rows, other in ((1, 1), (1, 128), (128, 1)):
            a, b = cast_like(N, COLUMNS, rows=rows), cast_like(K, COLUMNS, rows=other)
            yield triton_grouped.plan_grouped_wgrad(a, b, OFFS, TOKENS, dw)


@pytest.mark.parametrize("launch", [*grouped_in_triton()], ids=range(10))
def test_grouped_in_triton(launch: Launch) -> None:
    assert compile_for_sm90(launch).spilled_bytes == 0
