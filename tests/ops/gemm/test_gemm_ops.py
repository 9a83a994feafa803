"""What an op of a product asks its backend for and hands over; the reference against float64.

Checks and messages: test_checks.py. Registered ops: test_registered_ops.py.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Generator

from blocktensor.ops import formats, reference
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat, Quantized
from blocktensor.ops.gemm import ops
from blocktensor.ops.gemm.choose_backend import GemmProblem
from blocktensor.ops.gemm.ops import gemm
from blocktensor.ops.scale_layouts import in_vectors
from tests.support.backends import Watched
from tests.support.numeric import DTYPES, E4M3, FORMATS, assert_same, operand, worst_row


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch, ops, "choose_gemm")


def is_in_vectors(x: Quantized) -> bool:
    return x.data.is_contiguous() and x.data.shape[1] % 16 == 0 and x.data.data_ptr() % 16 == 0


@pytest.mark.parametrize("k", [1, 16, 130, 256, 300])
def test_a_backend_is_chosen_once_for_a_kind(k: int, watched: Watched, rng: Generator) -> None:
    """By the sizes of the operands as they are given, not as they are padded."""
    bias = torch.randn(2 * 129, generator=rng).bfloat16()[::2]
    for _ in range(3):
        a, b = operand(5, k, 1, rng), operand(129, k, 128, rng)
        assert_same(gemm(a, b, bias, torch.float32), reference.gemm(a, b, bias, torch.float32))
    sizes, device = (5, 129, k), torch.device("cpu")
    assert watched.problems == [
        GemmProblem(*sizes, BLOCKS_1X128, BLOCKS_128X128, torch.float32, device, torch.bfloat16)
    ]
    assert len(watched.given) == 3


@pytest.mark.parametrize("k", [1, 16, 130, 256, 300])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_backend_is_given_rows_as_it_reads_them(
    k: int, aligned: bool, watched: Watched, rng: Generator
) -> None:
    a, b = operand(5, k, 1, rng), operand(129, k, 128, rng)
    if not aligned:
        flat = torch.zeros(5 * k + 1).to(a.data.dtype)[1:]
        a = a._replace(data=flat.view(5, k).copy_(a.data))
    strided = torch.randn(2 * 129, generator=rng)[::2]
    for bias in (strided, strided.contiguous(), None):
        gemm(a, b, bias)
        x, y, z, *_ = watched.given.pop()
        assert (is_in_vectors(x), is_in_vectors(y)) == (True, True)
        assert (x.data is a.data) == (aligned and k % 16 == 0)
        assert (x.scale is a.scale, y.scale is b.scale) == (True, True)
        assert (x.format, y.format) == (BLOCKS_1X128, BLOCKS_128X128)
        if bias is strided:
            assert z.is_contiguous()
            assert torch.equal(z, bias)
        else:
            assert z is bias


@pytest.mark.parametrize(
    ("format", "of_a_row"),
    [
        (BLOCKS_128X128, BLOCKS_1X128),
        (formats.BLOCKS_128X128_POW2, formats.BLOCKS_1X128_POW2),
        (BLOCKS_1X128, BLOCKS_1X128),
    ],
)
def test_a_single_row_of_squares_is_a_row_for_kernels(
    format: BlockFormat, of_a_row: BlockFormat, watched: Watched, rng: Generator
) -> None:
    row, rows = (
        reference.quantize_rowwise(torch.randn(m, 300, generator=rng), format) for m in (1, 2)
    )
    other = operand(3, 300, 1, rng)
    for a, b in ((row, other), (other, row), (row, row), (rows, other)):
        assert_same(gemm(a, b), reference.gemm(a, b, None, torch.bfloat16))
    chosen = [(problem.a_format, problem.b_format) for problem in watched.problems]
    assert chosen == [
        (of_a_row, BLOCKS_1X128),
        (BLOCKS_1X128, of_a_row),
        (of_a_row, of_a_row),
        (format, BLOCKS_1X128),
    ]
    assert [(a.format, b.format) for a, b, *_ in watched.given] == chosen


def test_empty_products_ask_for_none(watched: Watched, rng: Generator) -> None:
    for m, n, k in ((0, 3, 5), (3, 0, 5), (0, 0, 0)):
        a, b = operand(m, k, 1, rng), operand(n, k, 128, rng)
        assert gemm(a, b, None, torch.float16).shape == (m, n)
    assert watched.problems == []


BLOCKS = ((1, 128), (1, 1), (128, 1), (128, 128))
SIZES = (0, 1, 127, 128, 129, 300, 576)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_every_shape(blocks: tuple[int, int], rng: Generator) -> None:
    """GEMMs with bias in fp32 agree with float64 in every row."""
    for m, n, k in product(SIZES, SIZES, SIZES):
        if m * n * k <= 300 * 129 * 128:
            a, b = operand(m, k, blocks[0], rng), operand(n, k, blocks[1], rng)
            bias = torch.randn(n, generator=rng)
            assert worst_row(reference.gemm(a, b, bias, torch.float32), a, b, bias) < 1e-6


@pytest.mark.parametrize("blocks", BLOCKS)
def test_sum_and_bias_are_rounded_once(blocks: tuple[int, int], rng: Generator) -> None:
    a, b = operand(130, 300, blocks[0], rng), operand(129, 300, blocks[1], rng)
    for dtype in DTYPES:
        bias = torch.randn(129, generator=rng).to(dtype)
        exact = reference.gemm(a, b, bias.float(), torch.float32)
        assert_same(reference.gemm(a, b, bias, dtype), exact.to(dtype))


@pytest.mark.parametrize(
    ("a_block", "b_block"), [((1, 32), (1, 32)), ((1, 128), (64, 64)), ((2, 48), (32, 32))]
)
def test_blocks_of_other_sizes(a_block: Any, b_block: Any, rng: Generator) -> None:
    """Sums are promoted wherever a scale of either side changes."""
    a_format, b_format = BlockFormat("a", a_block), BlockFormat("b", b_block)
    for m, n, k in ((130, 65, 300), (1, 1, 1), (5, 3, 96), (3, 5, 0)):
        x, y = torch.randn(m, k, generator=rng), torch.randn(n, k, generator=rng)
        a = reference.quantize_rowwise(x, a_format)
        b = reference.quantize_rowwise(y, b_format)
        bias = torch.randn(n, generator=rng)
        assert worst_row(reference.gemm(a, b, bias, torch.float32), a, b, bias) < 1e-6


def test_partial_products_are_scaled_before_they_are_summed() -> None:
    data = torch.tensor([[256.0] * 128 + [1.0] * 128]).to(E4M3)
    scale = torch.tensor([[2.0**-70, 2.0**70]])
    a, b = (Quantized(data, each, BLOCKS_1X128) for each in (scale, scale.flip(1)))
    assert reference.gemm(a, b, None, torch.float32).item() == 2.0**23 + 2.0**7


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_block_spoils_the_outputs_it_enters(blocks: Any, bad: float, rng: Generator) -> None:
    x = torch.randn(300, 300, generator=rng)
    x[140, 290] = bad
    a = reference.quantize_rowwise(x, FORMATS[blocks[0]])
    out = reference.gemm(a, operand(129, 300, blocks[1], rng), None, torch.float32)
    spoiled = torch.zeros(300, 129, dtype=torch.bool)
    spoiled[140 if blocks[0] == 1 else slice(128, 256)] = True
    assert torch.equal(~out.isfinite(), spoiled)


@pytest.mark.parametrize("b_rows", [1, 128])
def test_no_bit_depends_on_an_order_or_on_other_rows(b_rows: int, rng: Generator) -> None:
    a, b = operand(300, 256, 1, rng), operand(130, 256, b_rows, rng)
    want = reference.gemm(a, b, None, torch.float32)
    order = torch.cat([128 * i + torch.randperm(128, generator=rng) for i in range(2)])
    shuffled = [x._replace(data=x.data.view(torch.uint8)[:, order].view(E4M3)) for x in (a, b)]
    assert_same(reference.gemm(*shuffled, None, torch.float32), want)
    for rows in (slice(0, 1), slice(7, 10), slice(100, 300)):
        part = a._replace(data=a.data[rows], scale=a.scale[rows])
        assert_same(reference.gemm(part, b, None, torch.float32), want[rows])


@pytest.mark.parametrize("k", [1, 127, 129, 300, 4095])
@pytest.mark.parametrize("b_rows", [1, 128])
def test_zeros_after_either_side_change_no_bit(k: int, b_rows: int, rng: Generator) -> None:
    """As columnwise casts have them, beside an operand that may have none."""
    a, b = operand(5, k, 1, rng), operand(7, k, b_rows, rng)
    wide_a, wide_b = (x._replace(data=in_vectors(x.data), scale=x.scale) for x in (a, b))
    assert wide_a.data.shape[1] == wide_b.data.shape[1] == -(-k // 16) * 16
    want = reference.gemm(a, b, None, torch.float32)
    for left, right in ((wide_a, b), (a, wide_b), (wide_a, wide_b)):
        assert_same(gemm(left, right, None, torch.float32), want)
