"""What grouped ops refuse: what came, what was expected, the remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline

from blocktensor.ops.cast.grouped_ops import quantize_grouped, quantize_grouped_columnwise
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, Quantized
from blocktensor.ops.grouped_gemm.ops import (
    grouped_gemm,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_add_,
)
from tests.support.groups import columnwise, ends, stack
from tests.support.models import complaint
from tests.support.numeric import operand

RNG = torch.Generator().manual_seed(0)
X, OFFS = torch.randn(40, 200), ends(10, 20)
A, B = operand(40, 200, 1, RNG), stack(2, 130, 200, RNG)
G_COL, X_COL = columnwise(torch.randn(40, 130), OFFS), columnwise(X, OFFS)
Run = Callable[[], object]


def test_group_ends() -> None:
    both = [
        lambda offs: quantize_grouped(X, offs, BLOCKS_1X128),
        lambda offs: quantize_grouped_columnwise(X, offs, BLOCKS_1X128),
    ]
    products = [
        lambda offs: grouped_gemm(A, B, offs),
        lambda offs: grouped_gemm_wgrad(G_COL, X_COL, offs, 40),
        lambda offs: grouped_gemm_wgrad_add_(torch.zeros(2, 130, 200), G_COL, X_COL, offs, 40),
    ]
    for run in (*both, *products):
        assert_expected_inline(
            complaint(TypeError, lambda run=run: run(OFFS.long())),
            """\
offs has dtype torch.int64: expected torch.int32; use .to(torch.int32)""",
        )
        for wrong, shape in ((OFFS[:0], "[0]"), (OFFS[None], "[1, 2]"), (OFFS[0], "[]")):
            text = complaint(ValueError, lambda run=run, wrong=wrong: run(wrong))
            assert text.replace("\n", " ") == (
                f"offs has shape {shape}: expected [E], the cumulative end of each of E > 0 groups "
                f"of rows"
            )
    assert_expected_inline(
        complaint(ValueError, lambda: both[0](OFFS.to("meta"))),
        """\
the tensor to quantize is on cpu and offs on meta: move them to one device""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: products[0](OFFS.to("meta"))),
        """\
operand a is on cpu and offs on meta: move them to one device""",
    )


def test_casts() -> None:
    assert_expected_inline(
        complaint(ValueError, lambda: quantize_grouped(X, OFFS, BLOCKS_128X128)),
        """\
tokens in groups are cast in blocks of one row: got the format 128x128""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: quantize_grouped_columnwise(X[None], OFFS, BLOCKS_128X128)),
        """\
the tensor to quantize has 3 dimensions, shape [1, 40, 200]: expected 2; flatten
tokens to [T, K]""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: quantize_grouped(X[None], OFFS, BLOCKS_1X128)),
        """\
the tensor to quantize has 3 dimensions, shape [1, 40, 200]: expected 2; flatten
leading dimensions with .flatten(0, -2)""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: quantize_grouped(X.double(), OFFS, BLOCKS_1X128)),
        """\
the tensor to quantize has dtype torch.float64: blocktensor casts torch.bfloat16,
torch.float16 and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)""",
    )
    index = torch.arange(40)
    assert_expected_inline(
        complaint(TypeError, lambda: quantize_grouped(X, OFFS, BLOCKS_1X128, index.float())),
        """\
index has dtype torch.float32: expected torch.int32 or torch.int64""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: quantize_grouped(X, OFFS, BLOCKS_1X128, index[None])),
        """\
index has shape [1, 40]: expected [T], a row for each token""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: quantize_grouped(X, OFFS, BLOCKS_1X128, index.to("meta"))),
        """\
the tensor to quantize is on cpu and index on meta: move them to one device""",
    )


def test_products() -> None:
    matrix = Quantized(B.data[0], B.scale[0], B.format)
    narrow = operand(40, 130, 1, RNG)
    three = stack(3, 130, 200, RNG)
    assert_expected_inline(
        complaint(ValueError, lambda: grouped_gemm(A, matrix, OFFS)),
        """\
operand b has 2 dimensions, shape [130, 200]: expected 3; expected a stack [E, N, K]""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: grouped_gemm(B, B, OFFS)),
        """\
operand a has 3 dimensions, shape [2, 130, 200]: expected 2; a grouped GEMM
multiplies stacks""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: grouped_gemm(narrow, B, OFFS)),
        """\
cannot contract operand a [40, 130] with operand b [2, 130, 200]: K is 130 in one
and 200 in the other""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: grouped_gemm(A, three, OFFS)),
        """\
offs ends 2 groups, and operand b [3, 130, 200] is a stack of 3: expected one end
for each""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: grouped_gemm(A, B, OFFS, torch.zeros(130))),
        """the bias has shape [130]: expected [2, 130]""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: grouped_gemm(A, B, OFFS, None, torch.float64)),
        """\
output dtype torch.float64: expected torch.bfloat16, torch.float16 or torch.float32""",
    )


def test_weight_gradients() -> None:
    assert_expected_inline(
        complaint(ValueError, lambda: grouped_gemm_wgrad(G_COL, X_COL, OFFS, 300)),
        """\
operands contract 256 columns: expected 512, those of 300 tokens cast in 2 groups by
quantize_grouped_columnwise""",
    )
    for out, kind in (
        (torch.zeros(2, 130, 200).bfloat16(), TypeError),
        (torch.zeros(2, 200, 130), ValueError),
        (torch.zeros(2, 200, 130).mT, ValueError),
    ):
        text = complaint(kind, lambda out=out: grouped_gemm_wgrad_add_(out, G_COL, X_COL, OFFS, 40))
        if kind is TypeError:
            assert text == "grouped_gemm_wgrad_add_ adds into torch.float32, got torch.bfloat16"
    assert_expected_inline(
        text,
        """\
grouped_gemm_wgrad_add_ needs a contiguous output [2, 130, 200], got [2, 130, 200]
with strides (26000, 1, 130)""",
    )


@pytest.mark.parametrize("spoil", ["data", "scale"])
def test_dtypes_of_operands(spoil: str) -> None:
    wrong = A._replace(**{spoil: getattr(A, spoil).double()})
    text = complaint(TypeError, lambda: grouped_gemm(wrong, B, OFFS))
    what = "operand a has" if spoil == "data" else "the scale of operand a has"
    assert text.startswith(f"{what} dtype torch.float64: expected torch.float")
