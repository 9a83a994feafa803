"""Operands that do not fit a linear: what came, what was expected, the remedy."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import nn

import blocktensor
from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional
from tests.support.asserts import Call, refused
from tests.support.models import POWER_OF_TWO, SQUARE, linear, randn

W, X = randn(256, 384, seed=1), randn(5, 384)


def test_dtypes() -> None:
    run = functional.linear
    calls: list[Call] = [
        lambda: run(X.long(), W),
        lambda: run(X.to(torch.float8_e4m3fn), W),
        lambda: run(X, W.double()),
        lambda: run(X, W.half()),
        lambda: run(X, W, W[:, 0].float()),
        lambda: blocktensor.quantize(X.double()),
        lambda: BlockwiseFP8Weight(W.double()),
    ]
    assert_expected_inline(
        refused(*calls),
        """\
TypeError: the input of an FP8 linear layer has dtype torch.int64: blocktensor casts
  torch.bfloat16, torch.float16 and torch.float32 to FP8; convert it first, e.g.
  .to(torch.bfloat16)
TypeError: the input of an FP8 linear layer has dtype torch.float8_e4m3fn: blocktensor casts
  torch.bfloat16, torch.float16 and torch.float32 to FP8; convert it first, e.g.
  .to(torch.bfloat16)
TypeError: the weight of an FP8 linear layer has dtype torch.float64: blocktensor casts
  torch.bfloat16, torch.float16 and torch.float32 to FP8; convert it first, e.g.
  .to(torch.bfloat16)
TypeError: the input is torch.bfloat16 and the weight torch.float16: convert one of them, or run
  under torch.autocast
TypeError: the input is torch.bfloat16 and the bias torch.float32: convert one of them, or run
  under torch.autocast
TypeError: the tensor to quantize has dtype torch.float64: blocktensor casts torch.bfloat16,
  torch.float16 and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)
TypeError: the weight has dtype torch.float64: blocktensor casts torch.bfloat16, torch.float16
  and torch.float32 to FP8; convert it first, e.g. .to(torch.bfloat16)""",
    )


def test_sparse_tensors() -> None:
    layer = linear(384, 256)
    calls: list[Call] = [
        lambda: layer(X.to_sparse()),
        lambda: torch.mm(X.to_sparse(), layer.weight.t()),
        lambda: blocktensor.quantize(X.to_sparse()),
    ]
    assert_expected_inline(
        refused(*calls),
        """\
NotImplementedError: the input of an FP8 linear layer is sparse, torch.sparse_coo [5, 384]:
  expected a dense one; call .to_dense(), by 'weight'; to compute that in high precision, leave
  it unconverted
NotImplementedError: the input of an FP8 linear layer is sparse, torch.sparse_coo [5, 384]:
  expected a dense one; call .to_dense()
NotImplementedError: the tensor to quantize is sparse, torch.sparse_coo [5, 384]: expected a
  dense one; call .to_dense()""",
    )


def test_shapes_and_devices() -> None:
    run, meta = functional.linear, W.to("meta")
    calls: list[Call] = [
        lambda: run(X, W.expand(2, 256, 384)),
        lambda: run(X, W[0]),
        lambda: run(X[0, 0], W),
        lambda: blocktensor.quantize(X[0, 0]),
        lambda: BlockwiseFP8Weight(W[0]),
        lambda: run(X[:, 1:], W),
        lambda: run(X, W, W[:3, 0]),
        lambda: run(X, W, W),
        lambda: run(X, meta),
        lambda: run(X, W, meta[:, 0]),
    ]
    assert_expected_inline(
        refused(*calls),
        """\
ValueError: the weight of an FP8 linear layer has 3 dimensions, shape [2, 256, 384]: expected 2;
  stacks of experts need grouped_mm
ValueError: the weight of an FP8 linear layer has 1 dimensions, shape [384]: expected 2; stacks
  of experts need grouped_mm
ValueError: the input of an FP8 linear layer is a scalar: expected shape [..., K]
ValueError: cannot quantize a scalar in 1x128 blocks: expected shape [..., K]
ValueError: the weight has 1 dimensions, shape [384]: expected 2 or 3; FP8 weights are [N, K] or
  [E, N, K]
ValueError: cannot contract input [5, 383] with weight [256, 384]: K is 383 in one and 384 in
  the other
ValueError: the bias has shape [3]: expected [256], one entry for each output column
ValueError: the bias has shape [256, 384]: expected [256], one entry for each output column
ValueError: the input is on cpu and the weight on meta: move them to one device
ValueError: the input is on cpu and the bias on meta: move them to one device""",
    )


def test_mixed_recipes() -> None:
    module = linear(256, 384, recipe=POWER_OF_TWO)
    other = BlockwiseFP8Tensor.from_values(W, SQUARE, POWER_OF_TWO)
    shared = blocktensor.quantize(X)
    calls: list[Call] = [
        lambda: functional.linear(shared, other),
        lambda: functional.linear(shared, W, recipe=POWER_OF_TWO),
        lambda: module(shared),
        lambda: torch.mm(shared, module.weight.t()),
        lambda: functional.linear(X, other, recipe=Recipe()),
    ]
    (text,) = {refused(call) for call in calls[:-1]}
    assert_expected_inline(
        f"{text}\n{refused(calls[-1])}",
        """\
ValueError: mixed recipes: activations are cast with scale='power_of_two' here, and one was cast
  with scale='fp32'; cast both operands with one recipe, e.g. blocktensor.quantize(x,
  recipe=weight.recipe), or give both Recipe(scale=Scales(activations='fp32'))
ValueError: mixed recipes: weights are cast with scale='fp32' here, and one was cast with
  scale='power_of_two'; cast both operands with one recipe, e.g. blocktensor.quantize(x,
  recipe=weight.recipe), or give both Recipe(scale=Scales(weights='power_of_two'))""",
    )
    unseen = BlockwiseFP8Tensor.from_values(W, SQUARE, Recipe.deepseek())
    assert torch.equal(functional.linear(shared, unseen), functional.linear(X, W))


def test_blocks() -> None:
    wide = BlockwiseFP8Tensor.from_values(X, SQUARE)
    lone = BlockwiseFP8Tensor.from_values(X, columnwise=False)
    leaf = W.clone().requires_grad_()
    calls: list[Call] = [
        lambda: functional.linear(wide, W),
        lambda: BlockwiseFP8Tensor.from_values(X, (64, 64)),
        lambda: functional.linear(lone, leaf),
    ]
    assert_expected_inline(
        refused(*calls),
        """\
ValueError: the input of an FP8 linear layer has blocks of (128, 128): expected (1, 128);
  blocktensor.quantize(x) makes them
ValueError: block_shape (64, 64): expected (1, 128) (activations, gradients) or (128, 128)
  (weights)
ValueError: the input [5, 384], which is FP8 already, has no columnwise blocks, which the
  gradient of the weight needs; to cast them from its rowwise blocks would round twice, since
  their scales are no powers of two: cast it by blocktensor.quantize(x, recipe=weight.recipe),
  or give tokens and weights Recipe(scale=Scales(activations='power_of_two'))""",
    )
    rows = BlockwiseFP8Tensor.from_values(W)
    assert torch.isfinite(functional.linear(X, rows)).all()  # 1x128 weights are allowed


def test_a_module_says_what_is_wrong_with_its_input() -> None:
    module = nn.Sequential(linear(256, 384, bias=True))
    calls: list[Call] = [
        lambda: module(X.float()),
        lambda: module(X[:, :5]),
        lambda: module(X.to("meta")),
    ]
    assert_expected_inline(
        refused(*calls),
        """\
TypeError: the input is torch.float32 and the weight torch.bfloat16: convert one of them, or run
  under torch.autocast; in '0', a Linear
ValueError: cannot contract input [5, 5] with weight [256, 384]: K is 5 in one and 384 in the
  other; in '0', a Linear
ValueError: the input is on meta and the weight on cpu: move them to one device; in '0', a
  Linear""",
    )
    assert torch.isfinite(module(X)).all()  # and spoils nothing


def test_known_kinds_refuse_as_new_ones_do() -> None:
    """A plan that served a good call serves no bad one that looks nearly the same."""
    w, bias = linear(256, 384).weight, randn(256, seed=2)
    stack, offs = nn.Parameter(BlockwiseFP8Weight(randn(2, 256, 384))), torch.tensor([2, 5]).int()
    biases = randn(2, 256, seed=2)
    dense, grouped = functional.linear, functional.grouped_linear
    calls: list[Call] = [
        lambda: dense(X.half(), w),
        lambda: dense(X, w, bias.half()),
        lambda: dense(X, w, bias[:3]),
        lambda: dense(X, w, bias[None]),
        lambda: dense(X, w, bias.to("meta")),
        lambda: dense(X[:, 1:], w),
        lambda: dense(X[:, 0], w),
        lambda: dense(X.to("meta"), w),
        lambda: dense(X[0, 0], w),
        lambda: dense(X, w[:, 128:]),
        lambda: dense(X, w.to("meta")),
        lambda: grouped(X.half(), stack, offs),
        lambda: grouped(X[..., None], stack, offs),
        lambda: grouped(X[0], stack, offs),
        lambda: grouped(X, stack, offs.long()),
        lambda: grouped(X, stack, offs[1:]),
        lambda: grouped(X, stack, offs.to("meta")),
        lambda: grouped(X, stack, offs, biases[:1]),
        lambda: grouped(X, stack, offs, biases.half()),
        lambda: grouped(X, stack.mT, offs),
    ]
    new = [refused(call) for call in calls]
    for x in (X, X.clone().requires_grad_()):
        for y in (dense(x, w), dense(x, w, bias), grouped(x, stack, offs)):
            assert y.isfinite().all()
        assert grouped(x, stack, offs, biases).isfinite().all()
    assert [refused(call) for call in calls] == new
