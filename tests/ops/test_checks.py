"""Errors of ops, with their whole texts, and checks of what callers guarantee."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Generator

from blocktensor.ops import checks, formats
from blocktensor.ops.cast import ops as casts
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    GROUP_STEP,
    BlockFormat,
    Quantized,
)
from blocktensor.ops.gemm.ops import gemm
from blocktensor.ops.grouped_gemm.ops import grouped_gemm, grouped_gemm_wgrad
from blocktensor.ops.producers import ops
from tests.support.asserts import refused
from tests.support.groups import columnwise, ends, stack
from tests.support.numeric import E4M3, operand

RNG = Generator().manual_seed(0)
ROW, SQUARES, POW2_SQUARES = BLOCKS_1X128, formats.BLOCKS_128X128, formats.BLOCKS_128X128_POW2
A = Quantized(torch.zeros(3, 130).to(E4M3), torch.ones(3, 2), ROW)
B = Quantized(torch.zeros(5, 130).to(E4M3), torch.ones(5, 2), ROW)
SQUARE = Quantized(A.data, torch.ones(1, 2), SQUARES)
STACK = Quantized(torch.zeros(2, 3, 130).to(E4M3), torch.ones(2, 1, 2), SQUARES)
X, OFFS, EXPERTS = torch.randn(40, 200), ends(10, 20), stack(2, 130, 200, RNG)
TOKENS = operand(40, 200, 1, RNG)
G_COL, X_COL = columnwise(torch.randn(40, 130), OFFS), columnwise(X, OFFS)


def narrow(x: Quantized, k: int) -> Quantized:
    """The first ``k`` columns, contiguous, with the scales of one block."""
    return x._replace(data=x.data[:, :k].contiguous(), scale=x.scale[:, :1])


def misfits(*calls: Callable[[], object]) -> None:
    """Assert that each call is refused: its kernel would read or write beyond an operand."""
    for call in calls:
        with pytest.raises(ValueError, match="internal: arguments of an FP8 op do not fit"):
            call()


def test_operands_of_gemms() -> None:
    meta = [x.to("meta") for x in B[:2]]
    wrong: list[Any] = [
        (A._replace(data=A.data.float()), B),
        (A, B._replace(data=B.data.to(torch.float8_e5m2))),
        (A._replace(scale=A.scale.double()), B),
        (STACK, B),
        (A, STACK),
        (A, B._replace(data=B.data.t().contiguous().t())),
        (A, B._replace(scale=B.scale.t())),
        (A, B._replace(format=SQUARES)),
        (SQUARE._replace(format=BLOCKS_1X128_POW2), B),
        (narrow(A, 100), B),
        (A, B._replace(scale=meta[1])),
        (A, Quantized(meta[0], meta[1], ROW)),
        (A, B, torch.zeros(3)),
        (A, B, torch.zeros(5, 1)),
        (A, B, torch.zeros(5, device="meta")),
    ]
    gemm(A, B)  # an accepted kind lets no other pass
    misfits(*(partial(gemm, *operands) for operands in wrong))


@pytest.mark.parametrize("ks", [(130, 144), (144, 130), (130, 130), (1, 16), (0, 0)], ids=str)
def test_one_side_may_be_filled_up_with_zeros(ks: tuple[int, int]) -> None:
    a, b = (operand(3, k, 1, RNG) for k in ks)
    checks.gemm_operands(a, b)


ROWS_ONLY: list[Any] = [casts.quantize_rowwise, casts.quantize_columnwise, casts.quantize_both]
CASTS: list[tuple[Any, BlockFormat]] = [
    *product(ROWS_ONLY, [ROW, BLOCKS_1X128_POW2]),
    (lambda x, format: casts.quantize_grouped(x, OFFS.to(x.device), format, format), ROW),
    *product([casts.quantize_rowwise, casts.quantize_with_transpose], [SQUARES, POW2_SQUARES]),
    (casts.quantize_columnwise, SQUARES),
    (lambda x, format: casts.shard_amax(x, format, 0, 0), SQUARES),
    (lambda x, format: casts.quantize_shard(x, A.scale.to(x.device), format, 0, 0), SQUARES),
]


CASTABLE = (
    "blocktensor casts torch.bfloat16, torch.float16 and torch.float32 to FP8; convert it first, "
    "e.g. .to(torch.bfloat16)"
)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("cast", "format"), CASTS)
def test_every_cast(cast: Any, format: BlockFormat, device: str) -> None:
    """Dtypes and ranks; the first error is that of the dtype."""
    for dtype in (torch.float64, torch.int32, E4M3):
        said = f"the tensor to quantize has dtype {dtype}: {CASTABLE}"
        with pytest.raises(TypeError, match=re.escape(said)):
            cast(torch.zeros(3, 5).to(device, dtype), format)
    remedy = f"2 or 3; {format.name} blocks need [N, K] or [E, N, K]"
    if format.rows == 1:
        remedy = "2; flatten leading dimensions with .flatten(0, -2)"
    for rank in {0, 1, 3, 4} - {*format.ranks}:
        said = f"has {rank} dimensions, shape {[2] * rank}: expected {remedy}"
        with pytest.raises(ValueError, match=re.escape(said)):
            cast(torch.zeros([2] * rank, device=device), format)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_formats_of_casts(device: str) -> None:
    x, both = torch.zeros(3, 5, device=device), torch.zeros(2, 3, 5, device=device)
    offs = ends(1, 2, device=device)
    misfits(
        lambda: casts.quantize_both(x, SQUARES),
        lambda: casts.quantize_transpose(x, ROW),
        lambda: casts.quantize_with_transpose(x, ROW),
        lambda: casts.shard_amax(x, ROW, 0, 0),
        lambda: casts.quantize_grouped(x, offs, SQUARES, None),
        lambda: casts.quantize_grouped(both, offs, None, SQUARES),
    )


def test_group_ends() -> None:
    runs: list[Callable[[torch.Tensor], object]] = [
        lambda offs: casts.quantize_grouped(X, offs, ROW, None),
        lambda offs: casts.quantize_grouped(X, offs, None, ROW),
        lambda offs: grouped_gemm(TOKENS, EXPERTS, offs),
        lambda offs: grouped_gemm_wgrad(G_COL, X_COL, offs, 40),
        lambda offs: ops.gated(X, X, "silu", ROW, None, offs),
    ]
    wrong = (OFFS.long(), OFFS[:0], OFFS[None], OFFS[0])
    (text,) = {refused(*(partial(run, offs) for offs in wrong)) for run in runs}  # the same of all
    assert_expected_inline(
        text,
        """\
TypeError: offs has dtype torch.int64: expected torch.int32; use .to(torch.int32)
ValueError: offs has shape [0]: expected [E], the cumulative end of each of E > 0 groups of rows
ValueError: offs has shape [1, 2]: expected [E], the cumulative end of each of E > 0 groups of
  rows
ValueError: offs has shape []: expected [E], the cumulative end of each of E > 0 groups of rows""",
    )
    on_meta = [partial(run, OFFS.to("meta")) for run in (runs[0], runs[2])]
    assert_expected_inline(
        refused(*on_meta),
        """\
ValueError: the tensor to quantize is on cpu and offs on meta: move them to one device
ValueError: operand a is on cpu and offs on meta: move them to one device""",
    )


def test_grouped_products() -> None:
    matrix = Quantized(EXPERTS.data[0], EXPERTS.scale[0], SQUARES)
    misfits(
        lambda: grouped_gemm(TOKENS, matrix, OFFS),
        lambda: grouped_gemm(EXPERTS, EXPERTS, OFFS),
        lambda: grouped_gemm(operand(40, 130, 1, RNG), EXPERTS, OFFS),
        lambda: grouped_gemm(TOKENS, stack(3, 130, 200, RNG), OFFS),
        lambda: grouped_gemm(TOKENS, EXPERTS, OFFS, torch.zeros(130)),
        lambda: grouped_gemm(TOKENS._replace(data=TOKENS.data.double()), EXPERTS, OFFS),
        lambda: grouped_gemm(TOKENS._replace(scale=TOKENS.scale.double()), EXPERTS, OFFS),
        lambda: grouped_gemm_wgrad(G_COL, X_COL, OFFS, GROUP_STEP + 1),
        lambda: grouped_gemm_wgrad(G_COL, X_COL, OFFS[:1], 10),
    )


def test_which_casts_fit() -> None:
    for x in (A, A._replace(format=BLOCKS_1X128_POW2), SQUARE, STACK):
        checks.quantized(x)
    checks.quantized(STACK._replace(format=POW2_SQUARES))
    wrong = [
        A._replace(data=A.data.float()),
        A._replace(scale=A.scale.half()),
        STACK._replace(format=ROW),
        Quantized(STACK.data[0, 0], A.scale, SQUARES),
        A._replace(format=SQUARES),
        STACK._replace(scale=STACK.scale[:1]),
        A._replace(scale=A.scale.to("meta")),
    ]
    assert_expected_inline(
        refused(*(partial(checks.quantized, x) for x in wrong)),
        """\
TypeError: FP8 data has dtype torch.float32: expected torch.float8_e4m3fn
TypeError: scales have dtype torch.float16: expected torch.float32
ValueError: FP8 data has 3 dimensions, shape [2, 3, 130]: expected 2; 1x128 data is [M, K],
  128x128 data [N, K] or [E, N, K]
ValueError: FP8 data has 1 dimensions, shape [130]: expected 2 or 3; 1x128 data is [M, K],
  128x128 data [N, K] or [E, N, K]
ValueError: scales have shape [3, 2] for data [3, 130] in blocks of (128, 128): expected [1, 2]
ValueError: scales have shape [1, 1, 2] for data [2, 3, 130] in blocks of (128, 128): expected
  [2, 1, 2]
ValueError: FP8 data is on cpu and its scales on meta: move them to one device""",
    )


def test_producers() -> None:
    grad, gate, up = (torch.zeros(130, 300, dtype=torch.bfloat16) for _ in range(3))
    rest: Any = ("silu", ROW, None)
    misfits(
        lambda: ops.gated(gate, up, "silu", SQUARES, None),
        lambda: ops.gated(gate, up[:5], *rest),
        lambda: ops.gated(gate, up.float(), *rest),
        lambda: ops.gated(gate[None], up, *rest),
        lambda: ops.gated(gate, up.to("meta"), *rest),
        lambda: ops.gated_backward(grad[:, :7], gate, up, *rest),
        lambda: ops.gated_backward(grad.float(), gate, up, *rest),
        lambda: ops.joint_gated_backward(grad, gate[:, :299], *rest),
        lambda: ops.joint_gated_backward(grad, gate, *rest),
    )
