"""The reference GEMM against float64, and the order in which it scales and sums."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat, Quantized
from blocktensor.ops.gemm.ops import gemm, gemm_add_
from blocktensor.ops.scale_layouts import in_vectors
from tests.support.numeric import DTYPES, E4M3, FORMATS, assert_same, operand, worst_row

BLOCKS = ((1, 128), (1, 1), (128, 1), (128, 128))
SIZES = (0, 1, 127, 128, 129, 300, 576)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def check(m: int, n: int, k: int, blocks: tuple[int, int], rng: torch.Generator) -> None:
    """One GEMM with bias in fp32 agrees with float64 in every row."""
    a, b = operand(m, k, blocks[0], rng), operand(n, k, blocks[1], rng)
    bias = torch.randn(n, generator=rng)
    assert worst_row(reference.gemm(a, b, bias, torch.float32), a, b, bias) < 1e-6


@pytest.mark.parametrize("blocks", BLOCKS)
def test_every_shape(blocks: tuple[int, int], rng: torch.Generator) -> None:
    for m, n, k in itertools.product(SIZES, SIZES, SIZES):
        if m * n * k <= 300 * 129 * 128:
            check(m, n, k, blocks, rng)


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(0, 150),
    n=st.integers(0, 150),
    k=st.integers(0, 400),
    blocks=st.sampled_from(BLOCKS),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(m: int, n: int, k: int, blocks: tuple[int, int], seed: int) -> None:
    check(m, n, k, blocks, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_and_the_bias_are_rounded_once(
    blocks: tuple[int, int], dtype: torch.dtype, rng: torch.Generator
) -> None:
    a, b = operand(130, 300, blocks[0], rng), operand(129, 300, blocks[1], rng)
    bias = torch.randn(129, generator=rng).to(dtype)
    exact = reference.gemm(a, b, bias.float(), torch.float32)
    assert_same(reference.gemm(a, b, bias, dtype), exact.to(dtype))


@pytest.mark.parametrize("blocks", BLOCKS)
def test_gemm_add_adds_the_finished_product(blocks: tuple[int, int], rng: torch.Generator) -> None:
    a, b = operand(130, 300, blocks[0], rng), operand(129, 300, blocks[1], rng)
    out = torch.randn(130, 140, generator=rng)
    before = out.clone()
    reference.gemm_add_(out[:, :129], a, b)
    assert_same(out[:, :129], before[:, :129] + reference.gemm(a, b, None, torch.float32))
    assert_same(out[:, 129:], before[:, 129:])


@pytest.mark.parametrize(
    ("a_block", "b_block"), [((1, 32), (1, 32)), ((1, 128), (64, 64)), ((2, 48), (32, 32))]
)
def test_blocks_of_other_sizes(
    a_block: tuple[int, int], b_block: tuple[int, int], rng: torch.Generator
) -> None:
    """Sums are promoted wherever a scale of either side changes."""
    a_format, b_format = BlockFormat("a", a_block), BlockFormat("b", b_block)
    for m, n, k in ((130, 65, 300), (1, 1, 1), (5, 3, 96), (3, 5, 0)):
        x, y = torch.randn(m, k, generator=rng), torch.randn(n, k, generator=rng)
        a = reference.quantize_rowwise(x, a_format)
        b = reference.quantize_rowwise(y, b_format)
        bias = torch.randn(n, generator=rng)
        assert worst_row(reference.gemm(a, b, bias, torch.float32), a, b, bias) < 1e-6


def ones(rows: int, cols: int) -> Tensor:
    return torch.ones(rows, cols).to(E4M3)


def test_every_128_of_k_has_its_own_scale() -> None:
    a_scale = torch.tensor([[1.0, 2.0**-7, 2.0**-14]])
    b_scale = torch.tensor([[1.0, 1.0, 2.0], [4.0, 4.0, 4.0]])
    a, b = (
        Quantized(ones(1, 257), a_scale, BLOCKS_1X128),
        Quantized(ones(2, 257), b_scale, BLOCKS_1X128),
    )
    out = reference.gemm(a, b, None, torch.float32)
    assert out.tolist() == [[128 + 1 + 2.0**-13, 512 + 4 + 2.0**-12]]


def test_partial_products_are_scaled_before_they_are_summed() -> None:
    data = torch.tensor([[256.0] * 128 + [1.0] * 128]).to(E4M3)
    scale = torch.tensor([[2.0**-70, 2.0**70]])
    a, b = Quantized(data, scale, BLOCKS_1X128), Quantized(data, scale.flip(1), BLOCKS_1X128)
    out = reference.gemm(a, b, None, torch.float32)
    assert out.item() == 2.0**23 + 2.0**7


def test_a_square_scale_belongs_to_its_128_rows() -> None:
    scale = torch.tensor([[1.0], [2.0], [4.0]])
    a, b = (
        Quantized(ones(257, 4), scale, BLOCKS_128X128),
        Quantized(ones(129, 4), scale[:2], BLOCKS_128X128),
    )
    out = reference.gemm(a, b, None, torch.float32)
    factor = np.repeat([1, 2, 4], [128, 128, 1])
    assert out.tolist() == (4 * np.outer(factor, factor[:129])).tolist()


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_block_spoils_the_outputs_it_enters(
    blocks: tuple[int, int], bad: float, rng: torch.Generator
) -> None:
    x = torch.randn(300, 300, generator=rng)
    x[140, 290] = bad
    a = reference.quantize_rowwise(x, FORMATS[blocks[0]])
    out = reference.gemm(a, operand(129, 300, blocks[1], rng), None, torch.float32)
    spoiled = torch.zeros(300, 129, dtype=torch.bool)
    spoiled[140 if blocks[0] == 1 else slice(128, 256)] = True
    assert torch.equal(~out.isfinite(), spoiled)


@pytest.mark.parametrize("k", [1, 127, 129, 300, 4095])
@pytest.mark.parametrize("b_rows", [1, 128])
def test_zeros_after_either_side_change_no_bit(k: int, b_rows: int, rng: torch.Generator) -> None:
    """As columnwise casts have them, beside an operand that may have none."""
    a, b = operand(5, k, 1, rng), operand(7, k, b_rows, rng)
    wide_a, wide_b = (x._replace(data=in_vectors(x.data), scale=x.scale) for x in (a, b))
    assert wide_a.data.shape[1] == wide_b.data.shape[1] == -(-k // 16) * 16
    want = reference.gemm(a, b, None, torch.float32)
    out = torch.zeros(5, 7)
    for left, right in ((wide_a, b), (a, wide_b), (wide_a, wide_b)):
        assert_same(gemm(left, right, None, torch.float32), want)
        assert_same(gemm_add_(out.zero_(), left, right), want)
