"""The portable grouped GEMMs, interpreted on the CPU, agree with the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from blocktensor.ops import reference
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
)
from tests.support.gemms import TOLERANCE
from tests.support.groups import RANKS, Groups, exact, operands
from tests.support.interpreter import interpreted
from tests.support.numeric import DTYPES, assert_same, relative_error

CASES = [
    Groups((100, 0, 190), 10, 136, 144),
    Groups((128, 256), 0, 130, 200),
    Groups((0, 0, 5), 0, 1, 128),
    Groups((0, 0), 5, 16, 16),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.sizes))
FP32 = torch.float32


def assert_close(made: Tensor, wanted: Tensor) -> None:
    assert torch.equal(made.isfinite(), wanted.isfinite())
    good = wanted.isfinite()
    assert relative_error(made[good], wanted[good]) <= TOLERANCE[made.dtype]


@every_case
@interpreted
def test_fprop(case: Groups) -> None:
    from blocktensor.ops.grouped_gemm import triton_gemm

    for formats in ((BLOCKS_1X128, BLOCKS_128X128), (BLOCKS_1X128_POW2, BLOCKS_128X128_POW2)):
        offs, (x, _), _, w = operands(case, "cpu", *formats)
        for i, dtype in enumerate(DTYPES):
            given = x, w, offs, torch.randn(len(case.sizes), case.n) if i else None
            y = triton_gemm.grouped_gemm(*given, dtype, case.tokens)
            assert_close(y, reference.grouped_gemm(*given, FP32, case.tokens))
            assert not y[sum(case.sizes) :].any()  # rows of no group


@pytest.mark.parametrize(
    ("case", "rank"),
    # no step of the kernel depends on the rank and also on the sizes of groups
    [*((CASES[0], rank) for rank in RANKS), *((case, RANKS[1]) for case in CASES[1:])],
    ids=str,
)
@interpreted
def test_a_low_rank_product_is_added(case: Groups, rank: int) -> None:
    from blocktensor.ops.grouped_gemm import triton_gemm

    offs, x, w, left, right = exact(case, rank, "cpu")
    for bias in (None, torch.ones(len(case.sizes), case.n)):
        for dtype in (FP32, torch.bfloat16):
            given = x, w, offs, bias, dtype, case.tokens, left, right
            y = triton_gemm.grouped_gemm(*given)
            assert_same(y, reference.grouped_gemm(*given))


@pytest.mark.parametrize("x_columnwise", [BLOCKS_1X128, BLOCKS_128X128], ids=lambda x: x.name)
@every_case
@interpreted
def test_wgrad(case: Groups, x_columnwise: object) -> None:
    from blocktensor.ops.grouped_gemm import triton_gemm

    offs, (_, x), (_, g), _ = operands(case, "cpu", x_columnwise=x_columnwise)
    for a, b in ((g, x), (x, g)):  # a stack [E, K, N] has them exchanged
        made = triton_gemm.grouped_gemm_wgrad(a, b, offs, case.tokens, FP32)
        assert_close(made, reference.grouped_gemm_wgrad(a, b, offs, case.tokens, FP32))


@interpreted
def test_bad_blocks_of_one_group_reach_no_other() -> None:
    from blocktensor.ops.grouped_gemm import triton_gemm

    case = CASES[0]
    offs, (x, x_col), (_, g_col), w = operands(case, "cpu")
    x.scale[5, 0], w.scale[2, 0, 1], x_col.scale[:, 0] = math.nan, math.inf, math.nan
    y = triton_gemm.grouped_gemm(x, w, offs, None, FP32, case.tokens)
    assert_close(y, reference.grouped_gemm(x, w, offs, None, FP32, case.tokens))
    dw = triton_gemm.grouped_gemm_wgrad(g_col, x_col, offs, case.tokens, FP32)
    assert dw[0].isnan().all()
    assert dw[1:].isfinite().all()


@pytest.mark.parametrize("wrong", [[600, 700, 800], [100, 100, 700], [-5, 100, 90]], ids=str)
@interpreted
def test_ends_before_the_first_token_or_beyond_the_last(wrong: list[int]) -> None:
    from blocktensor.ops.grouped_gemm import triton_gemm

    case = CASES[0]._replace(left_over=0)
    _, (x, _), _, w = operands(case, "cpu")
    offs = torch.tensor(wrong, dtype=torch.int32)
    y = triton_gemm.grouped_gemm(x, w, offs, None, FP32, case.tokens)
    assert_close(y, reference.grouped_gemm(x, w, offs, None, FP32, case.tokens))
