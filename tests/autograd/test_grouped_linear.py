"""The differentiable grouped linear: what it multiplies and saves, and how it lives in autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional, quantize
from blocktensor.autograd.products import sum_groups
from tests.support.asserts import Call, refused
from tests.support.groups import GROUPS, columnwise, ends, ranges
from tests.support.linear_ways import (
    HIGH,
    ROWS,
    assert_all_equal,
    every_recipe,
    gone_when,
    saved_by,
    storage_is_gone,
    wgrad,
)
from tests.support.models import FP32_SCALES, POWER_OF_TWO, RECIPES, SQUARE, Trace, plain, randn
from tests.support.numeric import assert_same, relative_error
from tests.support.steps import ours

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
N, K = 144, 192
every_grouping = pytest.mark.parametrize("groups", GROUPS)


def stack(
    experts: int, *, recipe: Recipe = FP32_SCALES, dtype: Any = torch.bfloat16, kn: bool = False
) -> nn.Parameter:
    """Trainable experts ``[E, N, K]``, or ``[E, K, N]`` of the same values."""
    w = randn(experts, N, K, seed=1, dtype=dtype) / K**0.5
    return nn.Parameter(BlockwiseFP8Weight(w.mT.contiguous() if kn else w, recipe))


def sample(groups: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """x, the output's gradient and offs; NaN in the rows of no group."""
    rows, sizes = GROUPS[groups]
    x, grad = (randn(rows, c, seed=c, dtype=dtype) for c in (K, N))
    x[sum(sizes) :] = grad[sum(sizes) :] = float("nan")
    return x, grad, ends(*sizes)


def grads(run: Callable[..., Tensor], x: Tensor, grad: Tensor, *leaves: Tensor) -> list[Any]:
    """The output and the gradients of x and of ``leaves``, from scratch."""
    leaf = x.detach().clone().requires_grad_()
    for parameter in leaves:
        parameter.grad = None
    y = run(leaf)
    y.backward(grad)
    return [y.detach(), leaf.grad, *(parameter.grad for parameter in leaves)]


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


def natural(w: Tensor) -> Tensor:
    """A stack as ``[E, N, K]``, however it lies."""
    return w if w.shape[-1] == K else w.mT


def grads_of(
    x: Tensor, w: Any, offs: Tensor, grad: Tensor, bias: Tensor | None = None, **options: Any
) -> list[Any]:
    """Y and the gradients of x and of what is trained, from scratch."""
    leaves = [t for t in (w, bias) if t is not None and t.requires_grad]
    return grads(
        lambda t: functional.grouped_linear(t, natural(w), offs, bias, **options), x, grad, *leaves
    )


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
    x, grad = randn(512, K, grad=True), randn(512, N)
    whole = functional.grouped_linear(x, w, offs)
    want = torch.autograd.grad(whole, [x, w], grad)
    for rows in (250, 257, 300, 512):
        part = x[:rows]
        y = functional.grouped_linear(part, w, offs)
        assert (y.grad_fn.plan is whole.grad_fn.plan) == (rows > 256)
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


OF_GROUPS = "quantize_grouped 1x128"
PRODUCT, WGRAD = "grouped_gemm 1x128 128x128", "grouped_gemm_wgrad 1x128 128x128"


@pytest.mark.parametrize(
    ("x_grad", "w_grad", "forward", "backward"),
    [
        (True, True, f"{OF_GROUPS} 128x128", [f"{OF_GROUPS} 1x128", PRODUCT, WGRAD]),
        (True, False, OF_GROUPS, [OF_GROUPS, PRODUCT]),
        (False, True, f"{OF_GROUPS} 128x128", [OF_GROUPS, WGRAD]),
        (False, False, OF_GROUPS, []),
    ],
)
def test_only_what_is_asked_for_is_computed(
    x_grad: bool, w_grad: bool, forward: str, backward: list[str]
) -> None:
    """And nothing is read on the host."""
    x, grad, offs = sample("rows of no group")
    w, bias = stack(len(offs)).requires_grad_(w_grad), randn(len(offs), N, seed=2, grad=True)
    x.requires_grad_(x_grad)
    with Trace() as of_y:
        y = functional.grouped_linear(x, w, offs, bias)
    of_weight = "quantize_with_transpose" if x_grad else "quantize_rowwise"
    assert ours(of_y) == [f"{of_weight} 128x128", forward, PRODUCT]
    with Trace() as of_grads:
        torch.autograd.grad(y, [t for t in (x, w, bias) if t.requires_grad], grad)
    assert ours(of_grads) == backward
    assert of_grads.count("aten.segment_reduce") == 1
    for name in ("_local_scalar_dense", "item", "nonzero"):
        assert of_y.count(name) == of_grads.count(name) == 0


@pytest.mark.parametrize("recipe", [Recipe(), ROWS, HIGH], ids=lambda r: r.wgrad_input)
def test_what_is_saved(recipe: Recipe) -> None:
    x, _, offs = sample("ragged")
    x.requires_grad_()
    w = stack(len(offs), recipe=recipe)
    ends_, *of_x, weight = saved_by(lambda: functional.grouped_linear(x, w, offs))
    assert torch.equal(ends_, offs)
    assert weight is w or weight.master is w.master
    if recipe is HIGH:
        assert [t.data_ptr() for t in of_x] == [x.data_ptr()]
    else:
        want = columnwise(x.detach(), offs, recipe.wgrad_input_format)
        assert_same(of_x[0], want.data)
        assert_same(of_x[1], want.scale)
    w.requires_grad_(False)
    frozen = BlockwiseFP8Tensor.from_values(plain(w), SQUARE)
    saved = saved_by(lambda: [functional.grouped_linear(x, each, offs) for each in (w, frozen)])
    assert [t.dtype for t in saved] == [
        torch.int32,
        torch.bfloat16,
        torch.int32,
        torch.float8_e4m3fn,
        torch.float32,
    ]


def test_an_fp8_input_and_an_fp8_gradient() -> None:
    """Blocks along K know nothing of groups: they serve fprop and dgrad, and no wgrad."""
    x, grad, offs = sample("whole blocks")
    w, fp8_grad = stack(len(offs)).requires_grad_(False), BlockwiseFP8Tensor.from_values(grad)
    want = grads_of(x, w, offs, grad)
    got = grads(lambda t: functional.grouped_linear(quantize(t), w, offs), x, fp8_grad)
    assert_all_equal(got, want)
    trainable = stack(len(offs))
    with torch.no_grad():
        y = functional.grouped_linear(quantize(x), trainable, offs)
    assert_same(y, want[0])
    y = functional.grouped_linear(x, trainable, offs)
    assert_expected_inline(
        refused(
            lambda: functional.grouped_linear(quantize(x), trainable, offs),
            lambda: y.backward(fp8_grad, retain_graph=True),
        ),
        """\
ValueError: the input of a grouped FP8 linear layer is FP8 already, and its columnwise blocks,
  which the gradient of the weight needs, ignore the groups: pass the high-precision tensor;
  share_inputs(model) casts it once for several weights
NotImplementedError: a gradient of a grouped FP8 linear layer that is FP8 already: its
  columnwise blocks, which the gradient of the weight needs, ignore the groups; pass it in high
  precision (.dequantize())""",
    )


def test_ends_of_groups_that_change_before_backward_raise() -> None:
    x, grad, offs = sample("ragged")
    x.requires_grad_()
    w = stack(len(offs))
    y = functional.grouped_linear(x, w, offs)
    offs.mul_(1)
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        y.backward(grad)


@pytest.mark.not_repeated
@pytest.mark.parametrize("bias", [False, True])
def test_a_large_gradient_is_gone_when_the_products_run(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Callable[[], bool]] = []
    gone = gone_when(monkeypatch, "grouped_gemm", held)
    x, _, offs = sample("ragged")
    added = randn(len(offs), N, seed=2, grad=True) if bias else None
    y = functional.grouped_linear(x.requires_grad_(), stack(len(offs)), offs, added)
    y.register_hook(lambda g: held.append(storage_is_gone(g)))
    y.square().sum().backward()
    assert gone == [hasattr(torch.autograd.Function, "boxed_grads_call")]


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
ValueError: mixed recipes: one operand was cast with Recipe(scale='power_of_two'), the other
  with Recipe(scale='fp32'); cast both with one recipe, e.g. blocktensor.quantize(x,
  recipe=weight.recipe)
NotImplementedError: an FP8 linear layer of a nested tensor: call it on .values() of a jagged
  tensor, or on a padded one""",
    )
