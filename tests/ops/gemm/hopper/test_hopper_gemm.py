"""Every tile of the Hopper GEMM on a GPU; ``test_gemm_kernels.py`` tests the choice among them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Generator, Tensor

from blocktensor.ops import reference
from blocktensor.ops.devices import card
from blocktensor.ops.formats import Quantized
from blocktensor.ops.gemm.hopper.tiles import TILES, choose_tile
from tests.support import gemms
from tests.support.gemms import Shape
from tests.support.numeric import relative_error

pytest.importorskip("triton")

from blocktensor.ops.gemm.hopper import launch as hopper
from blocktensor.ops.gemm.hopper.launch import plan_sum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="written for sm_90",
    ),
]

CUDA = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = (1, 3, 127, 128, 129, 300, 576, 1408, 2112, 10944)
every_tile = pytest.mark.parametrize("name", TILES)


@pytest.fixture
def rng() -> Generator:
    return Generator(CUDA).manual_seed(0)


def fixed(name: str) -> SimpleNamespace:
    """The backend with one tile for all shapes."""
    tile = TILES[name]

    def gemm(a: Quantized, b: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        out = torch.empty(a.data.shape[0], b.data.shape[0], dtype=dtype, device=CUDA)
        hopper.plan_gemm(hopper.for_tma(a), hopper.for_tma(b), bias, out, tile)()
        return out

    return SimpleNamespace(gemm=gemm, blocks=(1, tile.b_block))


@every_tile
@pytest.mark.parametrize(("dtype", "count"), [(BF16, 30), (FP32, 15), (FP16, 5)])
def test_every_tile(name: str, dtype: torch.dtype, count: int, rng: Generator) -> None:
    module = fixed(name)
    for shape in gemms.shapes(count, count, SIZES, lambda _: True):
        gemms.check_shape(module, shape, module.blocks, rng, dtype)


@every_tile
@pytest.mark.parametrize("splits", [2, 7, 14])
def test_parts_of_k(name: str, splits: int, rng: Generator) -> None:
    tile = TILES[name]
    for m, n in ((130, 264), (1, 8), (64, 2048)):
        a, b = gemms.operands(Shape(m, n, 14 * 128), (1, tile.b_block), rng)
        rows = -(-m // tile.m) * tile.m
        sums = torch.full((splits * rows, n), float("nan"), device=CUDA)
        hopper.plan_gemm(a, b, None, sums, tile, splits)()
        bias = torch.randn(n, generator=rng, device=CUDA)
        out = torch.full((m, n), float("nan"), device=CUDA)
        plan_sum(sums.view(splits, rows, n), bias, out)()
        assert relative_error(out, reference.gemm(a, b, bias, FP32)) <= gemms.TOLERANCE[FP32]


def test_small_batches_are_made_in_parts(rng: Generator) -> None:
    for m in (1, 16, 64):
        assert choose_tile(m, 2048, 56, 128, card(CUDA))[1] > 1
        gemms.check_shape(hopper, Shape(m, 2048, 7168), (1, 128), rng, BF16)


@every_tile
@pytest.mark.parametrize(("n", "columns"), [(1032, 8), (129, 0), (129, 3), (264, 1)])
def test_nothing_is_written_outside(name: str, n: int, columns: int, rng: Generator) -> None:
    tile = TILES[name]
    a, b = gemms.operands(Shape(700, n, 384), (1, tile.b_block), rng)
    buffer = torch.full((701, n + columns), float("nan"), dtype=BF16, device=CUDA)
    out = buffer[:700, :n]
    hopper.plan_gemm(a, b, None, out, tile)()
    assert buffer[700:].isnan().all()
    assert buffer[:, n:].isnan().all()
    assert relative_error(out, reference.gemm(a, b, None, FP32)) <= gemms.TOLERANCE[BF16]


@pytest.mark.parametrize("check", gemms.OF_EVERY_TILE)
@every_tile
def test_numbers_of_every_tile(name: str, check: gemms.Check, rng: Generator) -> None:
    module = fixed(name)
    check(module, module.blocks, rng)


@every_tile
def test_many_tiles_for_each_program(name: str, rng: Generator) -> None:
    module = fixed(name)
    gemms.check_shape(module, Shape(8200, 6152, 144), module.blocks, rng, BF16)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 511), (64, 512), (5, 513), (130, 7168)])
@pytest.mark.parametrize("count", [2, 7])
def test_splits_are_added_in_order(m: int, n: int, count: int, rng: Generator) -> None:
    splits = torch.randn((count, m + 3, n), generator=rng, device=CUDA)
    bias = torch.randn(n, generator=rng, device=CUDA)
    whole = torch.randn((m, n + 5), generator=rng, device=CUDA)
    out, before = whole[:, :n], whole.clone()
    want = splits[0, :m]
    for part in splits[1:]:
        want = want + part[:m]
    plan_sum(splits, None, out)()
    assert torch.equal(out, want)
    plan_sum(splits, bias, out)()
    assert torch.equal(out, want + bias)
    assert torch.equal(whole[:, n:], before[:, n:])
    rounded = torch.empty((m, n), dtype=BF16, device=CUDA)
    plan_sum(splits, None, rounded)()
    assert torch.equal(rounded, want.bfloat16())
