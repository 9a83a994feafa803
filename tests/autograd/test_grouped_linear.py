"""What the differentiable grouped linear layer computes, and which input it refuses."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional, quantize
from blocktensor.autograd.matmuls import sum_groups
from blocktensor.ops.formats import GROUP_STEP
from tests.support.asserts import Call, refused
from tests.support.grouped_linears import (
    K,
    N,
    every_grouping,
    grads,
    grads_of,
    natural,
    sample,
    stack,
)
from tests.support.groups import GROUPS, ends, ranges
from tests.support.linear_ways import HIGH, ROWS, assert_all_equal, every_recipe, wgrad
from tests.support.models import FP32_SCALES, POWER_OF_TWO, RECIPES, SQUARE, plain, randn
from tests.support.numeric import assert_same, relative_error

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def expert_by_expert(
    x: Tensor, w: Tensor, offs: Tensor, grad: Tensor, bias: Tensor, recipe: Recipe
) -> list[Any]:
    """y, dx, dw and dbias of each group, by dense FP8 linears."""
    results = []
    for e, inside in enumerate(ranges(offs)):
        leaves = [t.detach().clone().requires_grad_() for t in (w[e], bias[e])]
        results.append(
            grads(
                lambda x, leaves=leaves: functional.linear(x, *leaves, recipe=recipe),
                x[inside],
                grad[inside],
                *leaves,
            )
        )
    return [*zip(*results, strict=True)]


@every_grouping
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.scale)
def test_equals_dense_linears_expert_by_expert(
    groups: str, recipe: Recipe, dtype: torch.dtype
) -> None:
    """Bit for bit on the CPU, of trainable, frozen and plain weights; NaN rows reach nothing."""
    x, grad, offs = sample(groups, dtype)
    used = int(offs[-1])
    w, bias = stack(len(offs), recipe=recipe, dtype=dtype), randn(len(offs), N, seed=2, dtype=dtype)
    want = expert_by_expert(x, plain(w), offs, grad, bias, recipe)
    frozen = BlockwiseFP8Tensor.from_values(plain(w), SQUARE, recipe)
    for weight in (w, plain(w).requires_grad_(), frozen):
        added = bias.clone().requires_grad_()
        y, dx, *dws, db = grads_of(x, weight, offs, grad, added, recipe=recipe)
        for got, parts in ((y, want[0]), (dx, want[1])):
            assert type(got) is Tensor
            assert_same(got[:used], torch.cat(parts))
            assert not got[used:].any()
        assert len(dws) == (weight is not frozen)
        for dw in dws:
            assert_same(dw, torch.stack(want[2]))
        torch.testing.assert_close(db, torch.stack(want[3]), rtol=1e-2, atol=1e-2)


@pytest.mark.not_repeated
def test_rows_within_a_step_share_a_plan() -> None:
    offs, w = ends(100, 0, 150), stack(3)
    x, grad = randn(2 * GROUP_STEP, K, grad=True), randn(2 * GROUP_STEP, N)
    whole = functional.grouped_linear(x, w, offs)
    want = torch.autograd.grad(whole, [x, w], grad)
    for rows in (250, GROUP_STEP + 1, GROUP_STEP + 44, 2 * GROUP_STEP):
        part = x[:rows]
        y = functional.grouped_linear(part, w, offs)
        assert (y.grad_fn.plan is whole.grad_fn.plan) == (rows > GROUP_STEP)
        dx, dw = torch.autograd.grad(y, [part, w], grad[:rows], retain_graph=True)
        assert_all_equal([y.detach(), dx, dw], [whole.detach()[:rows], want[0][:rows], want[1]])
        y.mul_(2)[1:].add_(1)
        assert_same(torch.autograd.grad(y, [part], grad[:rows])[0], 2 * want[0][:rows])


@pytest.mark.parametrize("halves", [(True, True), (True, False), (False, True)], ids=str)
def test_flops_are_those_of_the_tokens(halves: tuple[bool, bool]) -> None:
    """Where one half is counted, the other not, and experts are checkpointed."""
    x, _, offs = sample("ragged")
    gate, down = stack(5), nn.Parameter(BlockwiseFP8Weight(randn(5, K, N // 2), FP32_SCALES))
    product, x = 2 * len(x) * N * K, x.requires_grad_()
    counters = [FlopCounterMode(display=False) if each else None for each in halves]
    with counters[0] or nullcontext():
        y = checkpoint(functional.gated_experts, x, gate, None, down, offs, use_reentrant=False)
    with counters[1] or nullcontext():
        y.backward(randn(*y.shape))
    for counter, wanted in zip(counters, (1.5 * product, 4.5 * product), strict=True):
        assert counter is None or counter.get_total_flops() == wanted


@every_grouping
def test_a_stack_that_lies_transposed(groups: str) -> None:
    """Its gradient is computed as the stack lies: equal but for the order of fp32 sums."""
    x, grad, offs = sample(groups, torch.float32)
    w, kn = (stack(len(offs), dtype=torch.float32, kn=kn) for kn in (False, True))
    want = grads_of(x, w, offs, grad)
    want[2] = grads_of(x, plain(w).requires_grad_(), offs, grad, recipe=ROWS)[2]
    frozen = BlockwiseFP8Tensor.from_values(plain(kn), SQUARE).transpose(1, 2)
    assert_same(functional.grouped_linear(x, frozen, offs), want[0])
    x.requires_grad_()
    for weight in (kn, plain(kn).requires_grad_()):
        y = functional.grouped_linear(x, weight.mT, offs)
        dx, dw = torch.autograd.grad(y, [x, weight], grad)
        assert_same(y.detach(), want[0])
        assert_same(dx, want[1])
        assert dw.is_contiguous()  # before autograd lays it out as the weight
        assert relative_error(dw.mT, want[2]) <= 1e-6 or not want[2].any()


@every_grouping
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_a_bias_is_summed_in_fp32(groups: str, dtype: torch.dtype) -> None:
    rows, sizes = GROUPS[groups]
    grad = 1 + randn(rows, N, dtype=dtype) / 8
    grad[sum(sizes) :] = float("nan")
    offs = ends(*sizes)
    want = torch.stack([grad[inside].double().sum(0) for inside in ranges(offs)])
    for given in (grad, grad.t().contiguous().t(), grad[:, :1].expand(-1, N)):
        got = sum_groups(given, offs)
        assert got.dtype == torch.float32
        exact = want if given.stride(1) else want[:, :1].expand(-1, N)
        torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-4)


def test_ends_out_of_range_are_not_read_by_the_bias() -> None:
    x = torch.ones(10, 3)
    offs = torch.tensor([4, 2, -7, 10**6], dtype=torch.int32)
    assert sum_groups(x, offs)[:, 0].tolist() == [4, 0, 0, 6]


def no_experts(*shape: int) -> nn.Parameter:
    return nn.Parameter(BlockwiseFP8Weight(torch.empty(0, *shape, dtype=torch.bfloat16)))


@pytest.mark.parametrize("rows", [0, 5])
def test_no_experts(rows: int) -> None:
    """Every row is of no group, as in torch's own grouped product."""
    x = torch.full((rows, K), float("nan"), dtype=torch.bfloat16)
    gate, up, down = ws = [no_experts(N, K), no_experts(N, K), no_experts(K, N)]
    joint, bias = no_experts(2 * N, K), nn.Parameter(torch.empty(0, N, dtype=torch.bfloat16))
    for run, n, leaves in (
        (lambda x: functional.grouped_linear(x, gate, ends(), bias), N, [gate, bias]),
        (lambda x: torch._grouped_mm(x, gate.transpose(1, 2), offs=ends()), N, ws[:1]),
        (lambda x: functional.gated_experts(x, gate, up, down, ends()), K, ws),
        (lambda x: functional.gated_experts(x, joint, None, down, ends()), K, [joint, down]),
    ):
        y, dx, *dws = grads(run, x, torch.ones(rows, n, dtype=x.dtype), *leaves)
        assert_same(y, torch.zeros(rows, n, dtype=x.dtype))
        assert_same(dx, torch.zeros_like(x))
        for w, dw in zip(leaves, dws, strict=True):
            assert (dw.shape, dw.dtype) == (w.shape, w.dtype)


def test_no_experts_of_other_rows() -> None:
    leaves = no_experts(N, K), torch.zeros(0, N, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        y = functional.grouped_linear(randn(3, K, grad=True), leaves[0], ends(), leaves[1])
    assert_same(y.detach(), torch.zeros(3, N, dtype=torch.float16))
    y.backward(torch.ones_like(y))
    assert all(leaf.grad.shape == leaf.shape for leaf in leaves)
    rows = BlockwiseFP8Tensor.from_values(randn(3, K), columnwise=False)
    assert torch.equal(functional.grouped_linear(rows, no_experts(N, K), ends()), torch.zeros(3, N))
    x = randn(3, K, grad=True)
    functional.grouped_linear(quantize(x), leaves[0].detach(), ends()).sum().backward()
    assert_same(x.grad, torch.zeros_like(x))
    with pytest.raises(ValueError, match=r"K is 384 in one and 192 in the other"):
        functional.grouped_linear(randn(3, 2 * K), no_experts(N, K), ends())


@every_recipe
@every_grouping
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kn", [False, True])
def test_wgrad_input(groups: str, dtype: torch.dtype, kn: bool, recipe: Recipe) -> None:
    """Blocks begin anew in every group; rows of no group are NaN, and reach nothing."""
    x, grad, offs = sample(groups, dtype)
    w, usual = (
        stack(len(offs), recipe=r, dtype=dtype, kn=kn) for r in (recipe, Recipe(scale=recipe.scale))
    )
    y, dx, dw = grads_of(x, w, offs, grad)
    assert_all_equal([y, dx], grads_of(x, usual, offs, grad)[:2])
    assert dw.is_contiguous()
    for each, inside in zip(natural(dw), ranges(offs), strict=True):
        wanted = wgrad(grad[inside], x[inside], recipe, dtype)
        if kn or recipe is HIGH:  # sums in another order
            torch.testing.assert_close(each, wanted, rtol=2e-2, atol=1e-3)
        else:
            assert_same(each, wanted)


def test_bad_input() -> None:
    x, _, offs = sample("ragged")
    w, run = plain(stack(len(offs))), functional.grouped_linear
    rows = BlockwiseFP8Tensor.from_values(w)
    nested = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged)
    shared = quantize(x)
    calls: list[Call] = [
        lambda: run(x, w[0], offs),
        lambda: run(x[None], w, offs),
        lambda: run(x.double(), w, offs),
        lambda: run(x[:, 1:], w, offs),
        lambda: run(x, w, offs.long()),
        lambda: run(x, w, offs[1:]),
        lambda: run(x, w, offs[[0, *range(5)]]),
        lambda: run(x, w, offs.to("meta")),
        lambda: run(x, w, offs, torch.zeros(N).bfloat16()),
        lambda: run(x.float(), w, offs),
        lambda: run(x, rows, offs),
        lambda: run(shared, w, offs, recipe=POWER_OF_TWO),
        lambda: run(nested, w, offs),
    ]
    assert_expected_inline(
        refused(*calls),
        """\
ValueError: the weight of a grouped FP8 linear layer has 2 dimensions, shape [144, 192]:
  expected 3; stacks of experts are [E, N, K]; a matrix needs functional.linear
ValueError: the input of a grouped FP8 linear layer has 3 dimensions, shape [1, 270, 192]:
  expected 2; flatten tokens to [T, K]
TypeError: the input of a grouped FP8 linear layer has dtype torch.float64: blocktensor casts
  torch.bfloat16, torch.float16 and torch.float32 to FP8; convert it first, e.g.
  .to(torch.bfloat16)
ValueError: cannot contract input [270, 191] with weight [5, 144, 192]: K is 191 in one and 192
  in the other
TypeError: offs has dtype torch.int64: expected torch.int32; use .to(torch.int32)
ValueError: offs ends 4 groups, and the weight [5, 144, 192] is a stack of 5 experts: expected
  one end for each
ValueError: offs ends 6 groups, and the weight [5, 144, 192] is a stack of 5 experts: expected
  one end for each
ValueError: the input is on cpu and offs on meta: move them to one device
ValueError: the bias has shape [144]: expected [5, 144], one entry for each output column
TypeError: the input is torch.float32 and the weight torch.bfloat16: convert one of them, or run
  under torch.autocast
ValueError: the weight of a grouped FP8 linear layer has blocks of (1, 128): expected (128, 128)
ValueError: mixed recipes: activations are cast with scale='power_of_two' here, and one was cast
  with scale='fp32'; cast both operands with one recipe, e.g. blocktensor.quantize(x,
  recipe=weight.recipe), or give both Recipe(scale=Scales(activations='fp32'))
NotImplementedError: an FP8 linear layer of a nested tensor: call it on .values() of a jagged
  tensor, or on a padded one""",
    )
