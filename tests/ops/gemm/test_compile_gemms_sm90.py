"""Every tile of the Hopper GEMM compiles for sm_90 to the code that is meant; Triton's too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocktensor.ops.devices import H200
from blocktensor.ops.formats import BLOCKS_1X128, Quantized
from blocktensor.ops.scale_layouts import empty_quantized
from tests.support.numeric import FORMATS

pytest.importorskip("triton")

from blocktensor.ops.gemm import triton_gemm
from blocktensor.ops.gemm.hopper.launch import plan_gemm
from blocktensor.ops.gemm.hopper.tile import Tile
from blocktensor.ops.gemm.hopper.tiles import TILES, choose_tile
from tests.support import sm90
from tests.support.sm90 import Launches, Resources, compile_for_sm90

META = torch.device("meta")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
launches = sm90.launches


def compiled(
    tile: Tile,
    dtype: torch.dtype,
    *,
    m: int = 4096,
    n: int = 2112,
    bias: bool = False,
    add: bool = False,
    parts: int = 1,
) -> Resources:
    k = 7168
    a = empty_quantized((m, k), BLOCKS_1X128, META)
    b = empty_quantized((n, k), FORMATS[tile.b_block], META)
    out = torch.empty((m * parts, n), dtype=dtype, device=META)
    added: Tensor | None = torch.empty(n, dtype=BF16, device=META) if bias else None
    return compile_for_sm90(plan_gemm(a, b, added, out, add, tile, parts))


def assert_as_written(tile: Tile, code: Resources) -> None:
    assert code.spills_nothing_of_a_gemm
    # What 384 or 512 threads leave each; the consumers then take more from the producer
    assert code.registers == (168 if tile.warpgroups == 2 else 128)
    assert code.shared_bytes * tile.programs <= 227 * 1024
    # One wait a product: ptxas serialises products that it cannot keep under way, each with a wait
    # of its own. The first k block of a tile is code of its own where B has 128x128 blocks.
    copies = tile.warpgroups * (2 if tile.b_block == 128 else 1)
    products = tile.products * copies
    assert code.sass.count("WARPGROUP.DEPBAR") == products
    assert code.sass.count(f"QGMMA.64x{tile.width}x32") == 4 * products
    assert code.sass.count("QGMMA") == 4 * products


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("name", TILES)
def test_products(name: str, dtype: torch.dtype) -> None:
    assert_as_written(TILES[name], compiled(TILES[name], dtype))


@pytest.mark.parametrize("m", [1024, 40960])
@pytest.mark.parametrize("name", TILES)
def test_accumulation(name: str, m: int) -> None:
    """Of few waves, staged; and of many, directly where the tile does so."""
    tile = TILES[name]
    code = compiled(tile, FP32, m=m, add=True)
    assert_as_written(tile, code)
    chunks = tile.rows * tile.cols * tile.width // 32 * tile.warpgroups
    direct = m == 40960 and tile.b_block == 1 and not tile.turned
    staged = tile.warpgroups * (tile.buffers // 2) if direct else chunks
    assert code.sass.count("UTMAREDG") == staged
    # 64 x 32 numbers of a chunk, two a thread at a time
    assert code.sass.count("REDG.E.ADD.F32x2") == (chunks - staged) * 8


@pytest.mark.parametrize(
    ("name", "n"),
    [(n, 2112) for n, t in TILES.items() if t.b_block == 128]
    + [(n, 2111) for n, t in TILES.items() if t.b_block == 128 and t.rows == 1],
)
def test_bias(name: str, n: int) -> None:
    assert_as_written(TILES[name], compiled(TILES[name], BF16, bias=True, n=n))


def test_bias_and_masked_stores_get_a_tile_with_registers_to_spare() -> None:
    assert choose_tile(4096, 18431, 56, 128, H200, plain=True)[0].rows == 2
    assert choose_tile(4096, 18431, 56, 128, H200, plain=False)[0].rows == 1


@pytest.mark.parametrize("name", [n for n, t in TILES.items() if not t.turned])
def test_parts_of_k(name: str) -> None:
    assert_as_written(TILES[name], compiled(TILES[name], FP32, parts=7))


@pytest.mark.parametrize("name", TILES)
def test_rows_that_tma_cannot_address(name: str) -> None:
    assert_as_written(TILES[name], compiled(TILES[name], BF16, n=2111))


def operand(shape: tuple[int, ...], rows: int) -> Quantized:
    return empty_quantized(shape, FORMATS[rows], META)


@pytest.mark.parametrize(
    ("m", "n", "k", "a_rows", "b_rows", "dtype"),
    [
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
    ],
)
def test_triton(
    m: int,
    n: int,
    k: int,
    a_rows: int,
    b_rows: int,
    dtype: torch.dtype,
    launches: Launches,
) -> None:
    operands = operand((m, k), a_rows), operand((n, k), b_rows)
    assert launches.compile(lambda: triton_gemm.gemm(*operands, None, dtype)) == 1


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 7168, 2048), (3, 130, 129)])
def test_triton_with_bias_or_accumulation(m: int, n: int, k: int, launches: Launches) -> None:
    operands = operand((m, k), 1), operand((n, k), 128)
    assert (
        launches.compile(
            lambda: triton_gemm.gemm(*operands, torch.empty(n, dtype=BF16, device=META), BF16)
        )
        == 1
    )
    wide = torch.empty((m, n + 1), device=META)[:, :n]
    assert launches.compile(lambda: triton_gemm.gemm_add_(wide, *operands)) == 1
