"""Operands that do not fit a linear: what came, what was expected, the remedy."""

from __future__ import annotations

from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import blocktensor
from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional
from tests.support.experts import N, sample, stack
from tests.support.models import FP32_SCALES, POWER_OF_TWO, complaint, linear, plain, randn

W = randn(256, 384, seed=1)


X = randn(5, 384)


def square(x: Tensor = W, recipe: Recipe = FP32_SCALES) -> BlockwiseFP8Tensor:
    return BlockwiseFP8Tensor.from_values(x, (128, 128), recipe)


def test_wrong_dtypes() -> None:
    long, double = X.long(), X.double()
    assert_expected_inline(
        complaint(TypeError, lambda: functional.linear(long, W)),
        """\
the input of an FP8 linear has dtype torch.int64: blocktensor casts torch.bfloat16,
torch.float16 and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: functional.linear(X, W.double())),
        """\
the weight of an FP8 linear has dtype torch.float64: blocktensor casts
torch.bfloat16, torch.float16 and torch.float32 to FP8; convert it first, e.g.
.to(torch.bfloat16)""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: functional.linear(X, W.half())),
        """\
the input is torch.bfloat16 and the weight torch.float16: convert one of them, or
run under torch.autocast""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: functional.linear(X, W, W[:, 0].float())),
        """\
the input is torch.bfloat16 and the bias torch.float32: convert one of them, or run
under torch.autocast""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: blocktensor.quantize(double)),
        """\
the tensor to quantize has dtype torch.float64: blocktensor casts torch.bfloat16,
torch.float16 and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: BlockwiseFP8Weight(W.double())),
        """\
the weight has dtype torch.float64: blocktensor casts torch.bfloat16, torch.float16
and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: functional.linear(X.to(torch.float8_e4m3fn), W)),
        """\
the input of an FP8 linear has dtype torch.float8_e4m3fn: blocktensor casts
torch.bfloat16, torch.float16 and torch.float32 to FP8; convert it first, e.g.
.to(torch.bfloat16)""",
    )


def test_wrong_ranks() -> None:
    stack = W.expand(2, 256, 384)
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(X, stack)),
        """\
the weight of an FP8 linear has 3 dimensions, shape [2, 256, 384]: expected 2;
stacks of experts need grouped_mm""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(X, W[0])),
        """\
the weight of an FP8 linear has 1 dimensions, shape [384]: expected 2; stacks of
experts need grouped_mm""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(X[0, 0], W)),
        """the input of an FP8 linear is a scalar: expected shape [..., K]""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: blocktensor.quantize(X[0, 0])),
        """cannot quantize a scalar in 1x128 blocks: expected shape [..., K]""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: BlockwiseFP8Weight(W[0])),
        """\
the weight has 1 dimensions, shape [384]: expected 2 or 3; FP8 weights are [N, K] or
[E, N, K]""",
    )


def test_shapes_that_do_not_fit() -> None:
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(X[:, 1:], W)),
        """\
cannot contract input [5, 383] with weight [256, 384]: K is 383 in one and 384 in
the other""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(X, W, W[:3, 0])),
        """the bias has shape [3]: expected [256]""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(X, W, W)),
        """the bias has shape [256, 384]: expected [256]""",
    )


def test_mixed_recipes() -> None:
    module, other = linear(256, 384, recipe=POWER_OF_TWO), square(recipe=POWER_OF_TWO)
    shared = blocktensor.quantize(X)
    for run in (
        lambda: functional.linear(shared, other),
        lambda: functional.linear(X, other, recipe=FP32_SCALES),
        lambda: functional.linear(shared, W, recipe=POWER_OF_TWO),
        lambda: module(shared),
        lambda: torch.mm(shared, module.weight.t()),
    ):
        text = complaint(ValueError, run)
        assert text.startswith("mixed recipes")
    assert_expected_inline(
        text,
        """\
mixed recipes: one operand was cast with Recipe(scale='power_of_two'), the other
with Recipe(scale='fp32'); cast both with one recipe, e.g. blocktensor.quantize(x,
recipe=weight.recipe)""",
    )


def test_mixed_recipes_that_cannot_be_seen_in_the_operands() -> None:
    shared, other = blocktensor.quantize(X), square(recipe=Recipe(wgrad_input="128x128"))
    assert torch.equal(functional.linear(shared, other), functional.linear(X, W))


def test_mixed_devices() -> None:
    meta = W.to("meta")
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(X, meta)),
        """the input is on cpu and the weight on meta: move them to one device""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(X, W, meta[:, 0])),
        """the input is on cpu and the bias on meta: move them to one device""",
    )


def test_wrong_blocks() -> None:
    wide = BlockwiseFP8Tensor.from_values(X, (128, 128))
    rows = BlockwiseFP8Tensor.from_values(W)
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(wide, W)),
        """\
the input of an FP8 linear has blocks of (128, 128): expected (1, 128);
blocktensor.quantize(x) makes them""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: BlockwiseFP8Tensor.from_values(X, (64, 64))),
        """\
block_shape (64, 64): expected (1, 128) (activations, gradients) or (128, 128)
(weights)""",
    )
    lone = BlockwiseFP8Tensor.from_values(X, columnwise=False)
    leaf = W.clone().requires_grad_()
    assert_expected_inline(
        complaint(ValueError, lambda: functional.linear(lone, leaf)),
        """\
this BlockwiseFP8Tensor [5, 384] was cast in 1x128 blocks without its columnwise
form, which needs other scales: quantize the high-precision tensor with
columnwise=True""",
    )
    assert torch.isfinite(functional.linear(X, rows)).all()  # 1x128 weights are allowed


def test_a_module_says_what_is_wrong_with_its_input() -> None:
    module = nn.Sequential(linear(256, 384, bias=True))
    assert_expected_inline(
        complaint(TypeError, lambda: module(X.float())),
        """\
the input is torch.float32 and the weight torch.bfloat16: convert one of them, or
run under torch.autocast; in '0', a Linear""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: module(X[:, :5])),
        """\
cannot contract input [5, 5] with weight [256, 384]: K is 5 in one and 384 in the
other; in '0', a Linear""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: module(X.to("meta"))),
        """\
the input is on meta and the weight on cpu: move them to one device; in '0', a
Linear""",
    )


# Grouped linears


def test_operands_of_grouped_linears() -> None:
    x, _, offs = sample("ragged")
    w = plain(stack(len(offs)))

    def said(kind: type[Exception], *args: Any, **kwargs: Any) -> str:
        return complaint(kind, lambda: functional.grouped_linear(*args, **kwargs))

    assert_expected_inline(
        said(ValueError, x, w[0], offs),
        """\
the weight of a grouped FP8 linear has 2 dimensions, shape [144, 192]: expected 3;
stacks of experts are [E, N, K]; a matrix needs functional.linear""",
    )
    assert_expected_inline(
        said(ValueError, x[None], w, offs),
        """\
the input of a grouped FP8 linear has 3 dimensions, shape [1, 270, 192]: expected 2;
flatten tokens to [T, K]""",
    )
    assert_expected_inline(
        said(TypeError, x.double(), w, offs),
        """\
the input of a grouped FP8 linear has dtype torch.float64: blocktensor casts
torch.bfloat16, torch.float16 and torch.float32 to FP8; convert it first, e.g.
.to(torch.bfloat16)""",
    )
    assert_expected_inline(
        said(ValueError, x[:, 1:], w, offs),
        """\
cannot contract input [270, 191] with weight [5, 144, 192]: K is 191 in one and 192
in the other""",
    )
    assert_expected_inline(
        said(TypeError, x, w, offs.long()),
        """offs has dtype torch.int64: expected torch.int32; use .to(torch.int32)""",
    )
    assert_expected_inline(
        said(ValueError, x, w, offs[1:]),
        """\
offs ends 4 groups, and the weight [5, 144, 192] is a stack of 5 experts: expected
one end for each""",
    )
    assert_expected_inline(
        said(ValueError, x, w, offs.to("meta")),
        """the input is on cpu and offs on meta: move them to one device""",
    )
    assert_expected_inline(
        said(ValueError, x, w, offs, torch.zeros(N).bfloat16()),
        """the bias has shape [144]: expected [5, 144]""",
    )
    assert_expected_inline(
        said(TypeError, x.float(), w, offs),
        """\
the input is torch.float32 and the weight torch.bfloat16: convert one of them, or
run under torch.autocast""",
    )
    rows = BlockwiseFP8Tensor.from_values(w)
    assert_expected_inline(
        said(ValueError, x, rows, offs),
        """\
the weight of a grouped FP8 linear has blocks of (1, 128): expected (128, 128)""",
    )
    shared = blocktensor.quantize(x)
    assert "mixed recipes" in said(ValueError, shared, w, offs, recipe=POWER_OF_TWO)
    nested = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged)
    assert "nested" in said(NotImplementedError, nested, w, offs)


def test_several_weights_that_do_not_fit() -> None:
    x, _, offs = sample("ragged")
    a, b = stack(len(offs)), stack(len(offs), recipe=POWER_OF_TWO)
    assert_expected_inline(
        complaint(ValueError, lambda: functional.grouped_linear(x, [a, b], offs)),
        """\
weights of one input were cast in 1x128 and 1x128_pow2 blocks: give them one recipe,
or call grouped_linear(x, w, offs) for each""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: functional.grouped_linear(x, [], offs)),
        """\
0 weights with 0 biases: expected one for each of at least one weight, or bias=None""",
    )
    bias = torch.zeros(len(offs), N)
    assert_expected_inline(
        complaint(ValueError, lambda: functional.grouped_linear(x, [a, a], offs, [bias])),
        """\
2 weights with 1 biases: expected one for each of at least one weight, or bias=None""",
    )
    assert_expected_inline(
        complaint(ValueError, lambda: functional.grouped_linear(x, [a, a], offs, bias)),
        """\
2 weights with a single bias: expected one for each of at least one weight, or
bias=None""",
    )
    assert_expected_inline(
        complaint(TypeError, lambda: functional.grouped_linear(x, a, offs, [bias])),
        """one weight has one bias [E, N], got a list""",
    )
