"""Every refusal: its type and its whole text."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Generator

from blocktensor.ops import checks, formats
from blocktensor.ops.cast import ops as casts
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_1X128_POW2, BlockFormat, Quantized
from blocktensor.ops.gemm.ops import gemm, gemm_add_
from blocktensor.ops.grouped_gemm.ops import (
    grouped_gemm,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_add_,
)
from blocktensor.ops.producers import ops
from tests.support.groups import columnwise, ends, stack
from tests.support.numeric import E4M3, operand
from tests.support.refusals import refused

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


def test_operands_of_gemms() -> None:
    """Refused in the same words, whether the product is stored or added."""
    meta = [x.to("meta") for x in B[:2]]
    wrong = [
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
    ]
    gemm(A, B)  # an accepted kind lets no other pass
    runs = gemm, partial(gemm_add_, torch.zeros(3, 5))
    (text,) = {refused(*(partial(run, *operands) for operands in wrong)) for run in runs}
    assert_expected_inline(
        text,
        """\
TypeError: operand a has dtype torch.float32: expected torch.float8_e4m3fn
TypeError: operand b has dtype torch.float8_e5m2: expected torch.float8_e4m3fn
TypeError: the scales of operand a have dtype torch.float64: expected torch.float32
ValueError: operand a has 3 dimensions, shape [2, 3, 130]: expected 2; a grouped GEMM multiplies
  stacks
ValueError: operand b has 3 dimensions, shape [2, 3, 130]: expected 2; a grouped GEMM multiplies
  stacks
ValueError: operand b [5, 130] has strides (1, 5): FP8 GEMMs read operands contiguous along K;
  use .contiguous(), or the columnwise form of a transpose
ValueError: the scales of operand b have shape [2, 5] for data [5, 130] in blocks of (1, 128):
  expected [5, 2]
ValueError: the scales of operand b have shape [5, 2] for data [5, 130] in blocks of (128, 128):
  expected [1, 2]
ValueError: the scales of operand a have shape [1, 2] for data [3, 130] in blocks of (1, 128):
  expected [3, 2]
ValueError: cannot contract operand a [3, 100] with operand b [5, 130]: K is 100 in one and 130
  in the other
ValueError: operand b is on cpu and its scales on meta: move them to one device
ValueError: operand a is on cpu and operand b on meta: move them to one device""",
    )


def test_results_of_gemms() -> None:
    out = torch.zeros(3, 5)
    assert_expected_inline(
        refused(
            lambda: gemm(A, B, out_dtype=torch.float64),
            lambda: gemm(A, B, bias=torch.zeros(3)),
            lambda: gemm(A, B, bias=torch.zeros(5, 1)),
            lambda: gemm(A, B, bias=torch.zeros(5, device="meta")),
            lambda: gemm_add_(out.bfloat16(), A, B),
            lambda: gemm_add_(torch.zeros(5, 3), A, B),
            lambda: gemm_add_(torch.zeros(5, 3).t(), A, B),
            lambda: gemm_add_(out.to("meta"), A, B),
        ),
        """\
TypeError: output dtype torch.float64: expected torch.bfloat16, torch.float16 or torch.float32
ValueError: the bias has shape [3]: expected [5], one entry for each output column
ValueError: the bias has shape [5, 1]: expected [5], one entry for each output column
ValueError: operand a is on cpu and the bias on meta: move them to one device
TypeError: gemm_add_ adds into torch.float32, got an output of torch.bfloat16
ValueError: gemm_add_ needs an output with contiguous rows [3, 5], got [5, 3] with strides (3,
  1)
ValueError: gemm_add_ needs an output with contiguous rows [3, 5], got [3, 5] with strides (1,
  3)
ValueError: operand a is on cpu and the output on meta: move them to one device""",
    )


@pytest.mark.parametrize(
    ("fits", "k", "other"),
    [
        *((True, *ks) for ks in [(130, 144), (144, 130), (130, 130), (1, 16), (0, 0)]),
        *((False, *ks) for ks in [(130, 131), (130, 128), (128, 144), (144, 160), (0, 1)]),
    ],
)
def test_one_side_may_be_filled_up_with_zeros(fits: bool, k: int, other: int) -> None:
    said = f"K is {k} in one and {other} in the other"
    with nullcontext() if fits else pytest.raises(ValueError, match=said):
        checks.same_contraction(torch.empty(3, k), torch.empty(5, other))


ROWS_ONLY: list[Any] = [casts.quantize_rowwise, casts.quantize_columnwise, casts.quantize_both]
CASTS: list[tuple[Any, BlockFormat]] = [
    *product(ROWS_ONLY, [ROW, BLOCKS_1X128_POW2]),
    (lambda x, format: casts.quantize_grouped(x, OFFS.to(x.device), format), ROW),
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
def test_casts(device: str) -> None:
    x, both = torch.zeros(3, 5, device=device), torch.zeros(2, 3, 5, device=device)
    a = Quantized(A.data.to(device), A.scale.to(device), ROW)
    assert_expected_inline(
        refused(
            lambda: casts.quantize_columnwise(both, SQUARES),
            lambda: casts.quantize_both(x, SQUARES),
            lambda: casts.transpose(a),
            lambda: casts.quantize_transpose(x, ROW),
            lambda: casts.quantize_with_transpose(x, ROW),
            lambda: casts.shard_amax(x, ROW, 0, 0),
            lambda: casts.quantize_grouped(x, ends(1, 2, device=device), SQUARES),
            lambda: casts.quantize_grouped_columnwise(both, ends(1, 2, device=device), SQUARES),
        ),
        """\
ValueError: the tensor to quantize has 3 dimensions, shape [2, 3, 5]: expected 2; columnwise
  casts are those of a matrix [M, K]
ValueError: a columnwise cast in 128x128 blocks is the transpose of the rowwise one: use
  quantize_transpose(x, format)
ValueError: a cast in 1x128 blocks has no exact transpose: quantize x.t()
ValueError: a cast in 1x128 blocks has no exact transpose: quantize x.t()
ValueError: a cast in 1x128 blocks has no exact transpose: quantize x.t()
ValueError: shards are cast in square blocks, got format 1x128
ValueError: tokens in groups are cast in blocks of one row: got the format 128x128
ValueError: the tensor to quantize has 3 dimensions, shape [2, 3, 5]: expected 2; flatten tokens
  to [T, K]""",
    )


def test_group_ends() -> None:
    sum_of = torch.zeros(2, 130, 200)
    runs: list[Callable[[torch.Tensor], object]] = [
        lambda offs: casts.quantize_grouped(X, offs, ROW),
        lambda offs: casts.quantize_grouped_columnwise(X, offs, ROW),
        lambda offs: grouped_gemm(TOKENS, EXPERTS, offs),
        lambda offs: grouped_gemm_wgrad(G_COL, X_COL, offs, 40),
        lambda offs: grouped_gemm_wgrad_add_(sum_of, G_COL, X_COL, offs, 40),
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
    out, wide = torch.zeros(2, 130, 200), torch.zeros(2, 130, 208)
    assert_expected_inline(
        refused(
            lambda: grouped_gemm(TOKENS, matrix, OFFS),
            lambda: grouped_gemm(EXPERTS, EXPERTS, OFFS),
            lambda: grouped_gemm(operand(40, 130, 1, RNG), EXPERTS, OFFS),
            lambda: grouped_gemm(TOKENS, stack(3, 130, 200, RNG), OFFS),
            lambda: grouped_gemm(TOKENS, EXPERTS, OFFS, torch.zeros(130)),
            lambda: grouped_gemm(TOKENS, EXPERTS, OFFS, None, torch.float64),
            lambda: grouped_gemm(TOKENS._replace(data=TOKENS.data.double()), EXPERTS, OFFS),
            lambda: grouped_gemm(TOKENS._replace(scale=TOKENS.scale.double()), EXPERTS, OFFS),
            lambda: grouped_gemm_wgrad(G_COL, X_COL, OFFS, 300),
            lambda: grouped_gemm_wgrad(G_COL, X_COL, OFFS[:1], 10),
            lambda: grouped_gemm_wgrad_add_(out.bfloat16(), G_COL, X_COL, OFFS, 40),
            lambda: grouped_gemm_wgrad_add_(torch.zeros(2, 200, 130), G_COL, X_COL, OFFS, 40),
            lambda: grouped_gemm_wgrad_add_(torch.zeros(2, 200, 130).mT, G_COL, X_COL, OFFS, 40),
            lambda: grouped_gemm_wgrad_add_(wide[..., :200], G_COL, X_COL, OFFS, 40),
        ),
        """\
ValueError: operand b has 2 dimensions, shape [130, 200]: expected 3; expected a stack [E, N, K]
ValueError: operand a has 3 dimensions, shape [2, 130, 200]: expected 2; a grouped GEMM
  multiplies stacks
ValueError: cannot contract operand a [40, 130] with operand b [2, 130, 200]: K is 130 in one
  and 200 in the other
ValueError: offs ends 2 groups, and operand b [3, 130, 200] is a stack of 3 experts: expected
  one end for each
ValueError: the bias has shape [130]: expected [2, 130], one entry for each output column
TypeError: output dtype torch.float64: expected torch.bfloat16, torch.float16 or torch.float32
TypeError: operand a has dtype torch.float64: expected torch.float8_e4m3fn
TypeError: the scales of operand a have dtype torch.float64: expected torch.float32
ValueError: operands contract 256 columns: expected 512, those of 300 tokens cast in 2 groups by
  quantize_grouped_columnwise
ValueError: operands contract 256 columns: expected 128, those of 10 tokens cast in 1 groups by
  quantize_grouped_columnwise
TypeError: grouped_gemm_wgrad_add_ adds into torch.float32, got an output of torch.bfloat16
ValueError: grouped_gemm_wgrad_add_ needs a contiguous output [2, 130, 200], got [2, 200, 130]
  with strides (26000, 130, 1)
ValueError: grouped_gemm_wgrad_add_ needs a contiguous output [2, 130, 200], got [2, 130, 200]
  with strides (26000, 1, 130)
ValueError: grouped_gemm_wgrad_add_ needs a contiguous output [2, 130, 200], got [2, 130, 200]
  with strides (27040, 208, 1)""",
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
    wrong: Any = "swish"
    assert_expected_inline(
        refused(
            lambda: ops.gated(gate, up, wrong, ROW, None),
            lambda: ops.gated(gate, up, "silu", None, None),
            lambda: ops.gated(gate, up, "silu", SQUARES, None),
            lambda: ops.gated(gate, up[:5], *rest),
            lambda: ops.gated(gate, up.float(), *rest),
            lambda: ops.gated(gate[None], up, *rest),
            lambda: ops.gated(gate.int(), up, *rest),
            lambda: ops.gated(gate, up.to("meta"), *rest),
            lambda: ops.gated(gate, up, *rest, offs=torch.tensor([130])),
            lambda: ops.gated_backward(grad[:, :7], gate, up, *rest),
            lambda: ops.gated_backward(grad.float(), gate, up, *rest),
            lambda: ops.joint_gated_backward(grad, gate[:, :299], *rest),
            lambda: ops.joint_gated_backward(grad, gate, *rest),
            lambda: ops.gated_backward_with_h(grad[:, :8], gate, up, "silu", ROW, ROW, ROW),
            lambda: ops.gated_backward_with_h(grad, gate, up.float(), "silu", ROW, ROW, ROW),
            lambda: ops.gated_backward_with_h(grad, gate, up, wrong, ROW, ROW, ROW),
            lambda: ops.gated_backward_with_h(grad, gate, up, "silu", SQUARES, ROW, ROW),
        ),
        """\
ValueError: activation 'swish': expected one of silu, gelu_tanh
ValueError: neither a rowwise nor a columnwise format was given: pass one or both
ValueError: the rowwise format is 128x128: expected blocks of one row, e.g. 1x128; square blocks
  are for the columnwise form
ValueError: up has shape [5, 300] and gate [130, 300]: expected the same
TypeError: up has dtype torch.float32 and gate torch.bfloat16: convert one with .to()
ValueError: gate has 3 dimensions, shape [1, 130, 300]: expected 2; flatten tokens to [T, I]
TypeError: gate has dtype torch.int32: blocktensor casts torch.bfloat16, torch.float16 and
  torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)
ValueError: up is on meta and gate on cpu: move them to one device
TypeError: offs has dtype torch.int64: expected torch.int32; use .to(torch.int32)
ValueError: grad has shape [130, 7] and gate [130, 300]: expected the same
TypeError: grad has dtype torch.float32 and gate torch.bfloat16: convert one with .to()
ValueError: gate_up has 299 columns: expected gate, then as many columns of up
ValueError: grad has shape [130, 300] and gate [130, 150]: expected the same
ValueError: grad has shape [130, 8] and gate [130, 300]: expected the same
TypeError: up has dtype torch.float32 and gate torch.bfloat16: convert one with .to()
ValueError: activation 'swish': expected one of silu, gelu_tanh
ValueError: the rowwise format is 128x128: expected blocks of one row, e.g. 1x128; square blocks
  are for the columnwise form""",
    )
