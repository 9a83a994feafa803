"""Matmuls with adapted weights: order of rounding, errors against fp64, rows of no group.

Grouped matmuls of frozen stacks in bf16, of ranks up to 64, add the first term to the FP8 sum
(``autograd/adapted_linear.py``); ``plus_low_rank`` adds the others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, functional, quantize
from blocktensor.autograd.low_rank import plus_low_rank
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_1X128
from blocktensor.tensor.adapted import AdaptedWeight, LowRank
from tests.support.asserts import no_synchronization, refused
from tests.support.grouped_linears import K, N, every_grouping, sample
from tests.support.groups import GROUPS, ends, ranges
from tests.support.models import randn
from tests.support.numeric import DTYPES, assert_same, relative_error

RANK = 5  # is padded to whole vectors


def integers(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Values from -2 to 2: all sums of products below are exact in fp32, before any rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def in_documented_order(
    y: Tensor, x: Tensor, b: Tensor, a: Tensor, scaling: float, grad: Tensor
) -> list[Tensor]:
    """The output and the gradients of x, b and a for one group, rounded from fp64 at each step."""
    dtype = y.dtype

    def rounded(t: Tensor) -> Tensor:
        return t.to(dtype).double()

    y, x, b, a, grad = (t.double() for t in (y, x, b, a, grad))
    u = rounded(rounded(x @ a.t()) * scaling)
    v = rounded(rounded(grad @ b) * scaling)
    made = y + rounded(u @ b.t()), v @ a, grad.t() @ u, v.t() @ x
    return [t.to(dtype) for t in made]


@every_grouping
@pytest.mark.parametrize("scaling", [1.0, 0.75], ids=["plain", "scaled"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_step_is_rounded_once(groups: str, scaling: float, dtype: torch.dtype) -> None:
    """Bit for bit; rows of no group hold NaN."""
    x, grad, offs = sample(groups, dtype)
    inside = slice(0, int(offs[-1]))
    x[inside] = integers(*x[inside].shape, seed=1, dtype=dtype)
    grad[inside] = integers(*grad[inside].shape, seed=2, dtype=dtype)
    experts = len(offs)
    b, a = leaves(
        integers(experts, N, RANK, seed=3, dtype=dtype),
        integers(experts, RANK, K, seed=4, dtype=dtype),
    )
    y, x_leaf = leaves(integers(len(x), N, seed=5, dtype=dtype), x)
    made = plus_low_rank(y, x_leaf, LowRank(b, a, scaling), offs)
    made.backward(grad)

    assert torch.equal(made[int(offs[-1]) :], y[int(offs[-1]) :])
    assert_same(x_leaf.grad[int(offs[-1]) :], torch.zeros_like(x[int(offs[-1]) :]))
    assert_same(y.grad, grad)
    for e, rows in enumerate(ranges(offs)):
        want = in_documented_order(y[rows], x[rows], b[e], a[e], scaling, grad[rows])
        for got, each in zip(
            (made[rows], x_leaf.grad[rows], b.grad[e], a.grad[e]), want, strict=True
        ):
            torch.testing.assert_close(got, each, rtol=0, atol=0, equal_nan=True)


@every_grouping
@pytest.mark.parametrize("rank", [RANK, 64])
@pytest.mark.parametrize("scaling", [1.0, 0.75], ids=["plain", "scaled"])
def test_a_term_is_added_before_the_output_is_rounded(
    groups: str, scaling: float, rank: int
) -> None:
    """Bit for bit; rows of no group hold NaN. Gradients are rounded once, to the dtype of a and b.

    a is a transpose, and b lies in memory as peft stores it.
    """
    x, grad, offs = sample(groups)
    inside = slice(0, int(offs[-1]))
    experts, row = len(offs), BLOCKS_1X128
    values = randn(experts, N, K, seed=3) / K**0.5
    w = BlockwiseFP8Tensor.from_values(values, (128, 128))
    x_leaf, a, b = leaves(
        x, randn(experts, rank, K, seed=4).float(), randn(N, rank, experts, seed=5)
    )
    bias = randn(experts, N, seed=6)
    adapted = torch.baddbmm(w, b.permute(2, 0, 1), a, alpha=scaling)
    y = functional.grouped_linear(x_leaf, adapted, offs, bias)
    y.backward(grad)

    bf16, fp32 = torch.bfloat16, torch.float32
    a_t, b_e = a.detach().bfloat16().mT.contiguous(), b.detach().permute(2, 0, 1).contiguous()
    u, v = torch.zeros(len(x), rank, dtype=bf16), torch.zeros(len(x), rank, dtype=bf16)
    for e, rows in enumerate(ranges(offs)):
        u[rows] = ((x[rows].double() @ a_t[e].double()).float() * scaling).bfloat16()
        v[rows] = ((grad[rows].double() @ b_e[e].double()).float() * scaling).bfloat16()
    forms = [reference.quantize_rowwise(t, row) for t in (x, grad)]
    w_row, w_col = w.rowwise(), w.columnwise()
    y_sum = reference.grouped_gemm(forms[0], w_row, offs, None, fp32, len(x), u, b_e)
    dx = reference.grouped_gemm(forms[1], w_col, offs, None, bf16, len(x), v, a_t)
    assert_same(x_leaf.grad, dx)
    assert a.grad is not None and b.grad is not None
    for e, rows in enumerate(ranges(offs)):
        assert_same(y[rows], (y_sum[rows] + bias[e].float()).bfloat16())
        da = (v[rows].double().T @ x[rows].double()).float()
        assert_same(a.grad[e], da + 0.0)
        db = (grad[rows].double().T @ u[rows].double()).bfloat16()
        assert_same(b.grad[..., e], db + 0.0)
    for rest in (y[inside.stop :], x_leaf.grad[inside.stop :]):
        assert not rest.any()


def test_what_the_fp8_sum_does_not_take_is_added_to_the_output() -> None:
    """Larger ranks, other dtypes, weights with masters, inputs that are FP8 already."""
    values, (x, _, offs) = randn(5, N, K, seed=3) / K**0.5, sample("ragged")
    frozen = BlockwiseFP8Tensor.from_values(values, (128, 128))

    def made(x: Any, w: Any, rank: int) -> Tensor:
        term = LowRank(randn(5, N, rank, seed=4), randn(5, rank, K, seed=5), 0.5)
        y = functional.grouped_linear(x, AdaptedWeight(w, [term]), offs)
        separate = plus_low_rank(functional.grouped_linear(x, w, offs), x, term, offs)
        assert (y.dtype, y.shape) == (separate.dtype, separate.shape)
        return (y.float() - separate.float()).abs().max()

    assert made(x, frozen, 64) > 0  # another order of rounding
    assert made(x, frozen, 65) == 0
    assert made(x, BlockwiseFP8Weight(values), 8) == 0
    assert made(quantize(x), frozen, 8) == 0
    for dtype in (torch.float16, torch.float32):
        assert made(x.to(dtype), frozen.to(dtype), 8) == 0


@pytest.mark.parametrize("shape", [(7,), (2, 3)], ids=["a matrix", "a batch"])
def test_one_matrix_is_a_group_of_all_rows(shape: tuple[int, ...]) -> None:
    x, grad = randn(*shape, K, seed=1), randn(*shape, N, seed=2)
    w = BlockwiseFP8Tensor.from_values(randn(1, N, K, seed=3), (128, 128))
    b, a = randn(1, N, RANK, seed=4), randn(1, RANK, K, seed=5)
    rows = x.flatten(0, -2)
    results = []
    for run in (
        lambda x, b, a: F.linear(x, AdaptedWeight(w[0], [LowRank(b[0], a[0], 0.5)])),
        lambda x, b, a: functional.grouped_linear(
            x.flatten(0, -2), AdaptedWeight(w, [LowRank(b, a, 0.5)]), ends(len(rows))
        ).view(*shape, N),
    ):
        inputs = leaves(x, b, a)
        y = run(*inputs)
        y.backward(grad)
        results.append([y.detach(), *(t.grad for t in inputs)])
    for one, grouped in zip(*results, strict=True):
        assert_same(one.view(grouped.shape), grouped)


def decibels(got: Tensor, want: Tensor) -> float:
    error = (got.double() - want).norm() / want.norm()
    return float(-20 * error.log10())


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "with a master"])
def test_errors_against_the_sum_of_weights_in_fp64(trained: bool) -> None:
    """W + s B A of the dequantized W, in fp64, of the inputs and gradients that the matmuls read.

    FP8 rounds x and the gradient of y for the base, and nothing of the adapter.
    """
    rows, sizes = GROUPS["ragged"]
    offs, scaling, rank = ends(*sizes), 2.0, 16
    x, grad = randn(rows, K, seed=1), randn(rows, N, seed=2)
    values = randn(len(sizes), N, K, seed=3) / K**0.5
    w: Any = (
        BlockwiseFP8Weight(values)
        if trained
        else BlockwiseFP8Tensor.from_values(values, (128, 128))
    )
    x, b, a = leaves(
        x, randn(len(sizes), N, rank, seed=4) / 4, randn(len(sizes), rank, K, seed=5) / K**0.5
    )
    y = functional.grouped_linear(x, AdaptedWeight(w, [LowRank(b, a, scaling)]), offs)
    y.backward(grad)

    got = {"y": y, "dx": x.grad, "db": b.grad, "da": a.grad}
    want = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in got.items()}
    w64 = w.dequantize().double()
    x8, g8 = (quantize(t.detach()).dequantize().double() for t in (x, grad))
    for e, r in enumerate(ranges(offs)):
        b64, a64 = b[e].detach().double(), a[e].detach().double()
        x64, g64, delta = x[r].detach().double(), grad[r].double(), scaling * (b64 @ a64)
        want["y"][r] = x8[r] @ w64[e].t() + x64 @ delta.t()
        want["dx"][r] = g8[r] @ w64[e] + g64 @ delta
        dw = g64.t() @ x64  # of W + s B A
        want["db"][e], want["da"][e] = scaling * dw @ a64.t(), scaling * b64.t() @ dw
    errors = {name: decibels(got[name].detach(), want[name]) for name in got}
    assert min(errors.values()) >= 50, errors


@pytest.mark.gpu
@every_grouping
def test_a_gpu_computes_the_same_and_never_waits(groups: str) -> None:
    _, sizes = GROUPS[groups]
    x, grad, offs = sample(groups)
    w = BlockwiseFP8Tensor.from_values(randn(len(sizes), N, K, seed=3) / K**0.5, (128, 128))
    b, a = randn(len(sizes), N, RANK, seed=4) / 4, randn(len(sizes), RANK, K, seed=5) / K**0.5
    results = []
    for device in ("cpu", "cuda"):
        inputs = leaves(*(t.to(device) for t in (x, b, a)))
        stack, ends_there, gradient = w.to(device), offs.to(device), grad.to(device)
        for watched in (False, True):  # the first call decides
            for leaf in inputs:
                leaf.grad = None
            with no_synchronization() if device == "cuda" and watched else nullcontext():
                adapted = torch.baddbmm(stack, inputs[1], inputs[2], alpha=2.0)
                y = functional.grouped_linear(inputs[0], adapted, ends_there)
                y.backward(gradient)
        results.append([y.detach().cpu(), *(t.grad.cpu() for t in inputs)])
    for got, want in zip(*reversed(results), strict=True):
        assert got.isfinite().all()
        assert (got.double() - want.double()).norm() <= 0.01 * want.double().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("k", [K, 1024])
def test_a_gpu_computes_one_weight_with_any_number_of_rows(k: int) -> None:
    """Calls of other numbers of rows repeat what earlier ones recorded."""
    w = BlockwiseFP8Tensor.from_values(randn(N, k, seed=3) / k**0.5, (128, 128))
    b, a = randn(N, 16, seed=4) / 4, randn(16, k, seed=5).float() / k**0.5
    bias, there = randn(N, seed=6), w.cuda()
    for rows in (300, 257, 320, 1, 64, 63, 300, 1030, 290):
        x, grad = randn(2, rows, k, seed=rows), randn(2, rows, N, seed=rows + 1)
        found = []
        for device, weight in (("cpu", w), ("cuda", there)):
            inputs = leaves(*(t.to(device) for t in (x, b, a)))
            term = LowRank(inputs[1], inputs[2], 2.0)
            y = F.linear(inputs[0], AdaptedWeight(weight, [term]), bias.to(device))
            y.backward(grad.to(device))
            found.append([y.detach().cpu(), *(t.grad.cpu() for t in inputs)])
        for got, want in zip(*reversed(found), strict=True):
            assert relative_error(got, want) <= 0.01


CALLS: dict[str, Callable[[Tensor, Any, Tensor], Tensor]] = {
    "F.grouped_mm": lambda x, w, offs: F.grouped_mm(x, w.mT, offs=offs),
    "torch._grouped_mm": lambda x, w, offs: torch._grouped_mm(x, w.transpose(-2, -1), offs=offs),
    "permute": lambda x, w, offs: F.grouped_mm(x, w.permute(0, 2, 1), offs=offs),
    "torch.bmm": lambda x, w, offs: torch.bmm(x.view(3, 4, K), w.mT).flatten(0, 1),
    "matmul": lambda x, w, offs: (x.view(3, 4, K) @ w.mT).flatten(0, 1),
    "a stack on the left": lambda x, w, offs: (w @ x.view(3, 4, K).mT).mT.flatten(0, 1),
    "baddbmm": lambda x, w, offs: torch.baddbmm(
        x.new_zeros(3, 1, N), x.view(3, 4, K), w.mT
    ).flatten(0, 1),
    "one by one": lambda x, w, offs: torch.cat(
        [F.linear(x[4 * e : 4 * e + 4], w[e]) for e in range(3)]
    ),
    "select": lambda x, w, offs: torch.cat(
        [x[4 * e : 4 * e + 4] @ w.select(0, e).t() for e in range(3)]
    ),
    "another dtype and back": lambda x, w, offs: F.grouped_mm(
        x, w.float().mT.to(x.dtype), offs=offs
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_of_a_stack_computes_the_same(call: str) -> None:
    """With two terms; the gradients of b and a pass through views."""
    w = BlockwiseFP8Tensor.from_values(randn(3, N, K, seed=1), (128, 128))
    x, grad = randn(12, K, seed=2), randn(12, N, seed=3)
    matrices = [randn(3, *shape, seed=4 + i) for i, shape in enumerate([(N, 2), (2, K)] * 2)]
    results = []
    for run in (functional.grouped_linear, CALLS[call]):
        x_leaf, b0, a0, b1, a1 = inputs = leaves(x, *matrices)
        adapted = torch.baddbmm(torch.baddbmm(w, b0, a0, alpha=0.5), b1, a1)
        assert isinstance(adapted, AdaptedWeight)
        y = run(x_leaf, adapted, ends(4, 4, 4))
        y.backward(grad)
        results.append([y.detach(), *(t.grad for t in inputs)])
    for got, want in zip(*results, strict=True):
        assert_same(got, want)


def test_gated_experts_run_matmul_by_matmul() -> None:
    stacks = [
        BlockwiseFP8Tensor.from_values(randn(3, *s, seed=1), (128, 128))
        for s in ((2 * N, K), (K, N))
    ]
    (a, b), x = (randn(3, 4, K, seed=2), randn(3, 2 * N, 4, seed=3)), randn(12, K, seed=4)
    adapted, offs = torch.baddbmm(stacks[0], b, a), ends(4, 4, 4)
    y = functional.gated_experts(x, adapted, None, stacks[1], offs)
    gate, up = functional.grouped_linear(x, adapted, offs).chunk(2, -1)
    assert_same(y, functional.grouped_linear(F.silu(gate) * up, stacks[1], offs))


def test_the_sum_is_computed_on_request() -> None:
    w = BlockwiseFP8Tensor.from_values(randn(3, N, K, seed=1), (128, 128))
    b, a = leaves(randn(3, N, 2, seed=2), randn(3, 2, K, seed=3))
    values = torch.baddbmm(w, b, a, alpha=0.5).dequantize(torch.float32)
    torch.testing.assert_close(values, w.dequantize(torch.float32) + 0.5 * b.float() @ a.float())
    values.sum().backward()
    assert b.grad is not None and a.grad is not None


def test_a_weight_without_terms_is_its_base() -> None:
    stack, (x, _, offs) = (
        BlockwiseFP8Tensor.from_values(randn(5, N, K), (128, 128)),
        sample("ragged"),
    )
    assert_same(F.linear(x, AdaptedWeight(stack[0], [])), F.linear(x, stack[0]))
    got = functional.grouped_linear(x, AdaptedWeight(stack, []), offs)
    assert_same(got, functional.grouped_linear(x, stack, offs))


def test_an_input_in_fp8_is_dequantized_for_the_adapter() -> None:
    w = BlockwiseFP8Tensor.from_values(randn(N, K, seed=1), (128, 128))
    term = LowRank(randn(N, 2, seed=2), randn(2, K, seed=3), 1.0)
    x = quantize(randn(6, K, seed=4))
    want = plus_low_rank(F.linear(x, w), x.dequantize(), term, None)
    assert_same(F.linear(x, AdaptedWeight(w, [term])), want)


def test_frozen_adapters_save_no_input() -> None:
    w = BlockwiseFP8Tensor.from_values(randn(3, N, K, seed=1), (128, 128))
    b, a = randn(3, N, 8, seed=2), randn(3, 8, K, seed=3)
    (x,) = leaves(randn(12, K, seed=4))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.grouped_linear(x, torch.baddbmm(w, b, a), ends(4, 4, 4)).sum().backward()
    assert saved
    assert not any(t.shape == x.shape and t.dtype == x.dtype for t in saved)
    assert x.grad is not None


def test_what_is_refused() -> None:
    w = BlockwiseFP8Tensor.from_values(randn(3, N, K, seed=1), (128, 128))
    b, a = randn(3, N, 8, seed=2), randn(3, 8, K, seed=3)
    adapted = torch.baddbmm(w, b, a)
    text = refused(
        lambda: adapted + 1,
        lambda: adapted.transpose(0, 1),
        lambda: adapted[1:],
        lambda: adapted[torch.tensor([0, 2])],
        lambda: adapted.clone(),
        lambda: torch.einsum("enk,tk->etn", adapted, randn(4, K, seed=4)),
        lambda: torch.baddbmm(w, b[:2], a[:2]),
        lambda: AdaptedWeight(w, [LowRank(b.to("meta"), a, 1.0)]),
    )
    assert_expected_inline(
        text,
        """\
NotImplementedError: aten.add.Tensor is not implemented for an AdaptedWeight, an FP8 weight with
  an adapter whose sum only matmuls apply: multiply by it (torch.nn.functional.linear and
  grouped_mm, torch.matmul, bmm), one matrix of a stack at a time (w[i]) too; call .dequantize()
  to compute the sum in high precision; or merge the adapter after blocktensor.unfreeze(model)
NotImplementedError: transpose(0, 1) is not implemented for an AdaptedWeight, an FP8 weight with
  an adapter whose sum only matmuls apply: multiply by it (torch.nn.functional.linear and
  grouped_mm, torch.matmul, bmm), one matrix of a stack at a time (w[i]) too; call .dequantize()
  to compute the sum in high precision; or merge the adapter after blocktensor.unfreeze(model)
NotImplementedError: w[slice(1, None, None)] is not implemented for an AdaptedWeight, an FP8
  weight with an adapter whose sum only matmuls apply: multiply by it
  (torch.nn.functional.linear and grouped_mm, torch.matmul, bmm), one matrix of a stack at a
  time (w[i]) too; call .dequantize() to compute the sum in high precision; or merge the adapter
  after blocktensor.unfreeze(model)
NotImplementedError: aten.index.Tensor of a stack of FP8 weights [3, 144, 192] would copy
  matrices in high precision, and matmuls with them would run in it: multiply the whole stack by
  groups (torch.nn.functional.grouped_mm; in transformers experts_implementation='grouped_mm'),
  or one matrix at a time (w[i]); to read values, index .dequantize()
NotImplementedError: aten.clone.default is not implemented for an AdaptedWeight, an FP8 weight
  with an adapter whose sum only matmuls apply: multiply by it (torch.nn.functional.linear and
  grouped_mm, torch.matmul, bmm), one matrix of a stack at a time (w[i]) too; call .dequantize()
  to compute the sum in high precision; or merge the adapter after blocktensor.unfreeze(model)
NotImplementedError: einsum has no FP8 path, and computing it in high precision would be silent:
  use F.linear, torch.mm, torch.matmul or torch.addmm, of a stack of experts F.grouped_mm or
  torch.bmm; or say so on purpose with .high_precision() of a BlockwiseFP8Weight, .dequantize()
  of a BlockwiseFP8Tensor
ValueError: low-rank matrices [2, 144, 8] and [2, 8, 192] for an FP8 weight [3, 144, 192]:
  expected [..., N, r] and [..., r, K] for a weight [..., N, K]
ValueError: low-rank matrices on meta and cpu for an FP8 weight on cpu: move the adapter to cpu""",
    )


def test_a_second_derivative_is_refused() -> None:
    w = BlockwiseFP8Tensor.from_values(randn(3, N, K, seed=1), (128, 128))
    x, b, a = leaves(randn(12, K, seed=4), randn(3, N, 8, seed=2), randn(3, 8, K, seed=3))
    y = functional.grouped_linear(x, torch.baddbmm(w, b, a), ends(4, 4, 4))
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(y.sum(), b, create_graph=True)


def test_no_experts_and_no_rows() -> None:
    for experts, rows in ((0, 4), (3, 0)):
        w = BlockwiseFP8Tensor.from_values(randn(experts, N, K, seed=1), (128, 128))
        x, b, a = leaves(
            randn(rows, K, seed=4), randn(experts, N, 8, seed=2), randn(experts, 8, K, seed=3)
        )
        offs = torch.zeros(experts, dtype=torch.int32)
        y = functional.grouped_linear(x, torch.baddbmm(w, b, a), offs)
        y.sum().backward()
        assert y.shape == (rows, N)
        assert not y.any()
        for leaf in (x, b, a):
            assert_same(leaf.grad, torch.zeros_like(leaf))
