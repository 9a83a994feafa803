"""Every tile of the grouped Hopper GEMM compiles for sm_90, without a GPU, and spills nothing."""

from __future__ import annotations

import pytest
import torch

from blocktensor.ops.formats import (
    BLOCK,
    BLOCKS_1X128,
    BLOCKS_128X128,
    BlockFormat,
    group_blocks,
)
from blocktensor.ops.scale_layouts import empty_quantized

pytest.importorskip("triton")

from blocktensor.ops.grouped_gemm import tiles, triton_gemm
from blocktensor.ops.grouped_gemm.hopper_launch import plan_grouped_gemm, plan_grouped_wgrad
from tests.support.sm90 import Resources, compile_for_sm90

META = torch.device("meta")
ROWS, SQUARES = BLOCKS_1X128, BLOCKS_128X128
BF16, FP32 = torch.bfloat16, torch.float32
EXPERTS, TOKENS, N, K = 8, 4001, 2816, 2048
OFFS = torch.empty(EXPERTS, dtype=torch.int32, device=META)


def named(found: tiles.GroupedTile) -> str:
    return found.tile.name


def assert_fits(found: tiles.GroupedTile, code: Resources) -> None:
    assert code.spills_nothing_of_a_gemm
    assert code.shared_bytes * found.tile.programs <= 227 * 1024


@pytest.mark.parametrize("found", tiles.SQUARES, ids=named)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("n", [N, 130])
def test_fprop(found: tiles.GroupedTile, dtype: torch.dtype, has_bias: bool, n: int) -> None:
    if has_bias and found.tile.rows > 1:
        pytest.skip("not chosen: no registers are left")
    a = empty_quantized((TOKENS, K), BLOCKS_1X128, META)
    b = empty_quantized((EXPERTS, n, K), BLOCKS_128X128, META)
    out = torch.empty((TOKENS, n), dtype=dtype, device=META)
    bias = torch.empty((EXPERTS, n), dtype=BF16, device=META) if has_bias else None
    assert_fits(found, compile_for_sm90(plan_grouped_gemm(a, b, OFFS, bias, out, found.tile, 132)))


def wgrad(
    found: tiles.GroupedTile, dtype: torch.dtype, add: bool, n: int = N, k: int = K
) -> Resources:
    if not tiles.stores_fit(found.tile, n, k):
        pytest.skip("not chosen: no registers are left")
    columns = group_blocks(TOKENS, EXPERTS) * BLOCK
    a = empty_quantized((n, columns), BLOCKS_1X128, META)
    squares = found.tile.b_block == BLOCK
    b = empty_quantized((k, columns), BLOCKS_128X128 if squares else BLOCKS_1X128, META)
    out = torch.empty((EXPERTS, n, k), dtype=dtype, device=META)
    return compile_for_sm90(plan_grouped_wgrad(a, b, OFFS, TOKENS, out, add, found.tile, 132))


@pytest.mark.parametrize("found", tiles.ROWS + tiles.WGRAD_SQUARES, ids=named)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("n", "k"), [(N, K), (N, 130), (2880, 2880), (1408, K)])
def test_wgrad(found: tiles.GroupedTile, dtype: torch.dtype, n: int, k: int) -> None:
    assert_fits(found, wgrad(found, dtype, False, n, k))


@pytest.mark.parametrize("found", tiles.ADDED + tiles.ADDED_SQUARES, ids=named)
@pytest.mark.parametrize("n", [N, 2880])
def test_wgrad_added(found: tiles.GroupedTile, n: int) -> None:
    assert_fits(found, wgrad(found, FP32, True, n))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_triton(dtype: torch.dtype) -> None:
    x = empty_quantized((TOKENS, K), BLOCKS_1X128, META)
    w = empty_quantized((EXPERTS, N, K), BLOCKS_128X128, META)
    out = torch.empty((TOKENS, N), dtype=dtype, device=META)
    code = compile_for_sm90(triton_gemm.plan_grouped_gemm(x, w, OFFS, None, out))
    assert code.spilled_bytes == 0


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("formats", [(ROWS, ROWS), (ROWS, SQUARES), (SQUARES, ROWS)], ids=str)
def test_wgrad_in_triton(formats: tuple[BlockFormat, BlockFormat], dtype: torch.dtype) -> None:
    columns = group_blocks(TOKENS, EXPERTS) * BLOCK
    a, b = (
        empty_quantized((size, columns), format, META)
        for size, format in zip((N, K), formats, strict=True)
    )
    dw = torch.empty((EXPERTS, N, K), dtype=dtype, device=META)
    plan = triton_gemm.plan_grouped_wgrad(a, b, OFFS, TOKENS, dw, dtype == FP32)
    assert compile_for_sm90(plan).spilled_bytes == 0
