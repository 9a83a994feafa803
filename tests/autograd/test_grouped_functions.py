"""Torch functions that multiply by a stack of experts: all are the grouped linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, convert, freeze, functional
from tests.support.asserts import Call, refused
from tests.support.groups import ends
from tests.support.models import SQUARE, HeadGroups, Trace, randn
from tests.support.models import both_kinds as weights_of
from tests.support.numeric import assert_same

E, T, N, K = 3, 130, 144, 192
OFFS = ends(1, 0, 120)
Run = Callable[[Tensor, Tensor], Tensor]

GROUPED: dict[str, Run] = {
    "F.grouped_mm": lambda x, w: F.grouped_mm(x, w, offs=OFFS),
    "torch._grouped_mm": lambda x, w: torch._grouped_mm(x, w, offs=OFFS),
    "positional": lambda x, w: torch._grouped_mm(x, w, OFFS),
    "out_dtype": lambda x, w: F.grouped_mm(x, w, offs=OFFS, out_dtype=x.dtype),
    "transposed twice": lambda x, w: F.grouped_mm(x, w.mT.transpose(-2, -1), offs=OFFS),
}
BATCHED: dict[str, Run] = {
    "bmm": lambda x, w: torch.bmm(x, w),
    "Tensor.bmm": lambda x, w: x.bmm(w),
    "matmul": lambda x, w: torch.matmul(x, w),
    "@": lambda x, w: x @ w,
    "a stack on the left": lambda x, w: torch.bmm(w.mT, x.mT).mT,
    "@ with a stack on the left": lambda x, w: (w.mT @ x.mT).mT,
    "baddbmm": lambda x, w: torch.baddbmm(torch.zeros(E, T, N, dtype=x.dtype), x, w),
    "Tensor.baddbmm": lambda x, w: torch.zeros(E, T, N, dtype=x.dtype).baddbmm(x, w),
}


def both_kinds(lies: str) -> dict[str, tuple[Tensor, Tensor]]:
    """A trainable and a frozen stack ``[E, K, N]``, each with the tensor that has a gradient.

    It lies in memory as one of both layouts.
    """
    values = randn(E, K, N, seed=1) / K**0.5
    if lies == "E, K, N":
        return {name: (x, x) for name, x in weights_of(values).items()}
    return {name: (x.mT, x) for name, x in weights_of(values.mT.contiguous()).items()}


def check(run: Run, kind: str, lies: str, x: Tensor, rows: Tensor, offs: Tensor) -> None:
    """``run(x, w)`` and its gradients are those of the grouped linear of ``rows``."""
    w, leaf = both_kinds(lies)[kind]
    wanted: Run = lambda t, w: functional.grouped_linear(t, w.mT, offs)  # noqa: E731
    results = []
    for function, given in ((run, x), (wanted, rows)):
        given = given.clone().requires_grad_()
        leaf.grad = None
        with Trace() as trace:
            y = function(given, w)
            y.backward(randn(*rows.shape[:-1], N, seed=3).view(y.shape))
        assert trace.count("blocktensor.grouped_gemm") == 2 + (kind == "weight")
        assert trace.count("mm") == trace.count("blocktensor.grouped_gemm") + trace.count("baddbmm")
        results.append([y.detach(), given.grad, *([leaf.grad] if kind == "weight" else [])])
    for got, want in zip(*results, strict=True):
        assert type(got) is Tensor
        assert_same(got.reshape(want.shape), want)


every_kind = pytest.mark.parametrize("kind", ["weight", "tensor"])
every_layout = pytest.mark.parametrize("lies", ["E, N, K", "E, K, N"])


@every_kind
@every_layout
@pytest.mark.parametrize("name", GROUPED)
def test_grouped_products(name: str, lies: str, kind: str) -> None:
    x = randn(T, K)
    check(GROUPED[name], kind, lies, x, x, OFFS)


@every_kind
@every_layout
@pytest.mark.parametrize("name", BATCHED)
def test_batched_products_are_groups_of_equal_size(name: str, lies: str, kind: str) -> None:
    x = randn(E, T, K)
    check(BATCHED[name], kind, lies, x, x.flatten(0, 1), ends(T, T, T))


@pytest.mark.parametrize("way", ["convert", "freeze"])
def test_a_frozen_weight_viewed_as_a_stack(way: str) -> None:
    """It has the bits of the trainable weight, whose views are cast by themselves."""
    torch.manual_seed(0)
    modules = HeadGroups(3, 128, 200), HeadGroups(3, 128, 200)
    modules[1].load_state_dict(modules[0].state_dict())
    modules[1].requires_grad_(way == "freeze")
    for module in modules:
        convert(module, skip_small=False)
    if way == "freeze":
        freeze(modules[1])
    results = []
    for module in modules:
        x = randn(70, 600, dtype=torch.float32, grad=True)
        with Trace() as trace:
            y = module(x)
            y.backward(randn(70, 384, seed=3, dtype=torch.float32))
        assert trace.count("mm") == trace.count("blocktensor.grouped_gemm") == 2 + (not results)
        results.append([y.detach(), x.grad])
    for got, want in zip(*results, strict=True):
        assert_same(got, want)


@every_kind
def test_batches_without_rows(kind: str) -> None:
    w, leaf = both_kinds("E, K, N")[kind]
    x = randn(E, 0, K, grad=True)
    y = torch.bmm(x, w)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == ((E, 0, N), x.shape)
    assert kind == "tensor" or not leaf.grad.any()


@every_kind
@pytest.mark.parametrize("shape", [(E, T, N), (E, 1, N), (1, N), (N,), (E, T, 1), (E, 1, 1)])
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 1), (1, 2)])
def test_baddbmm(shape: tuple[int, ...], beta: float, alpha: float, kind: str) -> None:
    w, _ = both_kinds("E, K, N")[kind]
    x, added = randn(E, T, K, dtype=torch.float32), randn(*shape, seed=4, dtype=torch.float32)
    added.requires_grad_()
    of_values = BlockwiseFP8Tensor.from_values
    stack = w.float() if kind == "weight" else of_values(w.dequantize(torch.float32), SQUARE)
    product = torch.bmm(x, stack)
    with Trace() as trace:
        y = torch.baddbmm(added, x, stack, beta=beta, alpha=alpha)
    torch.testing.assert_close(y, alpha * product + beta * added)
    y.sum().backward()
    torch.testing.assert_close(added.grad, torch.full_like(added, beta * E * T * N / added.numel()))
    as_bias = shape == (E, 1, N) and beta == alpha == 1
    assert trace.count("aten.add") == (not as_bias)


def test_a_bias_of_experts() -> None:
    w, _ = both_kinds("E, N, K")["weight"]
    x, bias = randn(T, K), randn(E, N, seed=2)
    want = functional.grouped_linear(x, w.mT, OFFS, bias)
    assert_same(F.grouped_mm(x, w, offs=OFFS, bias=bias), want)


def test_autocast() -> None:
    w, _ = both_kinds("E, N, K")["weight"]
    x = randn(T, K, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, z = F.grouped_mm(x, w, offs=OFFS), torch.bmm(x.expand(E, T, K), w)
    assert y.dtype == z.dtype == torch.bfloat16
    assert_same(y, F.grouped_mm(x.bfloat16(), w, offs=OFFS))


def fallback() -> Any:
    pytest.importorskip("transformers.integrations.moe")  # which defines the op
    return torch.ops.transformers.grouped_mm_fallback


@every_kind
@every_layout
@pytest.mark.parametrize("offs", [OFFS, OFFS.long()], ids=["int32", "int64"])
@pytest.mark.parametrize("overload", [False, True])
def test_the_fallback_of_transformers(overload: bool, offs: Tensor, lies: str, kind: str) -> None:
    op, x = fallback(), randn(T, K)
    op = op.default if overload else op
    check(lambda x, w: op(x, w, offs=offs), kind, lies, x, x, OFFS)


@every_kind
def test_below_autograd_the_fallback_is_refused(kind: str) -> None:
    """Its own products are of high precision, in forward and in backward."""
    op, (w, _) = fallback(), both_kinds("E, K, N")[kind]
    with (
        torch._C.DisableTorchFunctionSubclass(),
        pytest.raises(
            NotImplementedError, match=r"grouped_mm_fallback.*(F\.grouped_mm|dequantize)"
        ),
    ):
        op(randn(T, K), w, OFFS)


def test_the_fallback_of_plain_weights_is_untouched() -> None:
    x, w = randn(T, K, dtype=torch.float32), randn(E, K, N, seed=1, dtype=torch.float32)
    assert_same(fallback()(x, w, OFFS)[:1], x[:1] @ w[0])


def test_transformers_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function for experts, with its fallback and without."""
    fallback()
    from transformers.integrations import moe

    w = nn.Parameter(BlockwiseFP8Weight(randn(E, N, K, seed=1)))
    want = functional.grouped_linear(randn(T, K), w, OFFS)
    for possible in (True, False):
        monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_, possible=possible: possible)
        assert_same(moe._grouped_linear(randn(T, K), w, OFFS), want)


def test_refused_products() -> None:
    w, _ = both_kinds("E, N, K")["weight"]
    x, xs = randn(T, K), randn(E, T, K)
    calls: list[Call] = [
        lambda: F.grouped_mm(xs, w),
        lambda: F.grouped_mm(x, w),
        lambda: F.grouped_mm(x, w, offs=OFFS, out_dtype=torch.float32),
        lambda: F.grouped_mm(x, w, offs=OFFS.long()),
        lambda: torch.bmm(w, w.mT),
        lambda: xs[:2] @ w,
        lambda: xs[0] @ w,
    ]
    assert_expected_inline(
        refused(*calls),
        """\
NotImplementedError: grouped_mm of Tensor [3, 130, 192] by BlockwiseFP8Weight [3, 192, 144] has
  no FP8 path: the left operand must be tokens [T, K] in groups, the right one a stack of FP8
  experts [E, K, N]; torch.bmm multiplies stacks [E, T, K]. Call .dequantize(), or
  .high_precision() of a BlockwiseFP8Weight, to compute in high precision
ValueError: grouped_mm of [130, 192] by [3, 192, 144] needs offs: int32 [3], the cumulative end
  of each group of rows
NotImplementedError: grouped_mm with out_dtype torch.float32 for an input of torch.bfloat16:
  convert the result, or run under torch.autocast
TypeError: offs has dtype torch.int64: expected torch.int32; use .to(torch.int32)
NotImplementedError: a batched matmul of BlockwiseFP8Weight [3, 192, 144] by BlockwiseFP8Weight
  [3, 144, 192] has no FP8 path: one operand must be a stack of FP8 experts [E, K, N], the other
  a batch [E, T, K] in high precision; call .dequantize(), or .high_precision() of a
  BlockwiseFP8Weight, to compute in high precision
ValueError: cannot multiply the batch [2, 130, 192] by the stack [3, 192, 144]: expected [E, T,
  K] by [E, K, N]
NotImplementedError: matmul of [130, 192] by [3, 192, 144] has no FP8 path: the right operand
  must be a matrix [K, N], or a stack of experts [E, K, N] and the left one [E, T, K]; call
  .dequantize(), or .high_precision() of a BlockwiseFP8Weight, to compute in high precision""",
    )
    others: list[Call] = [
        lambda: F.grouped_mm(x, w[0], offs=OFFS),
        lambda: F.grouped_mm(w[0].mT, x, offs=OFFS),
        lambda: F.grouped_mm(w, x.mT, offs=OFFS),
        lambda: torch.bmm(BlockwiseFP8Tensor.from_values(xs), xs.mT),  # an activation is no weight
        lambda: torch.baddbmm(xs, w, w),
        lambda: torch.addbmm(xs[0], xs, w),
        lambda: xs[None] @ w,
        lambda: torch.einsum("etk,ekn->etn", xs, w),
    ]
    for product in others:
        with pytest.raises(NotImplementedError, match="no FP8 path"):
            product()
