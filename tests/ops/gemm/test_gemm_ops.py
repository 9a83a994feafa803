"""What an op of a product asks its backend for, and what it hands over; with a backend of its own.

Checks and messages: test_checks.py. Registered ops: test_registered_ops.py. Numbers: the tests of
each backend.
"""

from __future__ import annotations

import pytest
import torch

from blocktensor.ops import reference
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    BlockFormat,
    Quantized,
)
from blocktensor.ops.gemm import ops
from blocktensor.ops.gemm.choose_backend import GemmProblem
from tests.support.numeric import assert_same, operand
from tests.support.reference_ops import Watched


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch, ops, "choose_gemm")


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def is_in_vectors(x: Quantized) -> bool:
    return x.data.is_contiguous() and x.data.shape[1] % 16 == 0 and x.data.data_ptr() % 16 == 0


@pytest.mark.parametrize("k", [1, 16, 130, 256, 300])
def test_a_backend_is_chosen_once_for_a_kind(
    k: int, watched: Watched, rng: torch.Generator
) -> None:
    """By the sizes of the operands as they are given, not as they are padded."""
    bias = torch.randn(2 * 129, generator=rng).bfloat16()[::2]
    for _ in range(3):
        a, b = operand(5, k, 1, rng), operand(129, k, 128, rng)
        want = reference.gemm(a, b, bias, torch.float32)
        assert_same(ops.gemm(a, b, bias, torch.float32), want)
        out = torch.randn(5, 129, generator=rng)
        want = out + reference.gemm(a, b, None, torch.float32)
        assert_same(ops.gemm_add_(out, a, b), want)
    sizes, device = (5, 129, k), torch.device("cpu")
    assert watched.problems == [
        GemmProblem(*sizes, BLOCKS_1X128, BLOCKS_128X128, torch.float32, device, torch.bfloat16),
        GemmProblem(
            *sizes, BLOCKS_1X128, BLOCKS_128X128, torch.float32, device, None, accumulate=True
        ),
    ]
    assert len(watched.given) == 6


@pytest.mark.parametrize("k", [1, 16, 130, 256, 300])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_backend_is_given_rows_as_it_reads_them(
    k: int, aligned: bool, watched: Watched, rng: torch.Generator
) -> None:
    a, b = operand(5, k, 1, rng), operand(129, k, 128, rng)
    if not aligned:
        flat = torch.zeros(5 * k + 1).to(a.data.dtype)[1:]
        a = a._replace(data=flat.view(5, k).copy_(a.data))
    strided = torch.randn(2 * 129, generator=rng)[::2]
    for bias in (strided, strided.contiguous(), None):
        ops.gemm(a, b, bias)
        x, y, z, _ = watched.given.pop()
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
        (BLOCKS_128X128_POW2, BLOCKS_1X128_POW2),
        (BLOCKS_1X128, BLOCKS_1X128),
    ],
)
def test_a_single_row_of_squares_is_a_row_for_kernels(
    format: BlockFormat, of_a_row: BlockFormat, watched: Watched, rng: torch.Generator
) -> None:
    """Its scales are those of 1x128 blocks, which more kernels take on the left."""
    row, rows = (
        reference.quantize_rowwise(torch.randn(m, 300, generator=rng), format) for m in (1, 2)
    )
    other = operand(3, 300, 1, rng)
    for a, b in ((row, other), (other, row), (row, row), (rows, other)):
        assert_same(ops.gemm(a, b), reference.gemm(a, b, None, torch.bfloat16))
    chosen = [(problem.a_format, problem.b_format) for problem in watched.problems]
    assert chosen == [
        (of_a_row, BLOCKS_1X128),
        (BLOCKS_1X128, of_a_row),
        (of_a_row, of_a_row),
        (format, BLOCKS_1X128),
    ]
    assert [(a.format, b.format) for a, b, *_ in watched.given] == chosen


def test_empty_products_ask_for_none(watched: Watched) -> None:
    rng = torch.Generator().manual_seed(0)
    for m, n, k in ((0, 3, 5), (3, 0, 5), (0, 0, 0)):
        a, b = operand(m, k, 1, rng), operand(n, k, 128, rng)
        assert ops.gemm(a, b, None, torch.float16).shape == (m, n)
        ops.gemm_add_(torch.zeros(m, n), a, b)
    assert watched.problems == []
