"""Products of the FP8 types below autograd: in FP8, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight
from blocktensor.tensor.adapted import AdaptedWeight
from tests.support.models import (
    POWER_OF_TWO,
    SQUARE,
    both_kinds,
    composed,
    in_a_layer,
    plain,
    quantized,
    randn,
)


def test_below_autograd_products_are_fp8_too() -> None:
    """Callers that arrive there (DTensor's local ops) with plain or FP8 operands."""
    x, bias, aten = randn(5, 384), randn(256, seed=4), torch.ops.aten
    bare, wanted = (composed(x, W, randn(5, 256), bias=each)[0] for each in (None, bias))
    mm, addmm = in_a_layer(aten.mm), in_a_layer(aten.addmm)
    for w in both_kinds(W).values():
        with torch.no_grad():
            assert torch.equal(mm(x, w.t()), bare)
            assert torch.equal(addmm(bias, x, w.t()), wanted)
            assert torch.equal(mm(w, x.t()).t(), bare)
        with torch.inference_mode():  # where composite ops arrive whole
            matmul, linear = in_a_layer(aten.matmul), in_a_layer(aten.linear)
            for rows in (x, x[None]):
                shape = *rows.shape[:-1], 256
                assert torch.equal(matmul(rows, w.t()), bare.view(shape))
                assert torch.equal(linear(rows, w), bare.view(shape))
                assert torch.equal(linear(rows, w, bias), wanted.view(shape))
        with torch.no_grad():
            terms = (bias, 3, 2), (bias, 1, 2), (bias, 3, 1), (randn(5, 256), 1, 1)
            for term, beta, alpha in terms:
                scaled = addmm(term, x, w.t(), alpha=alpha, beta=beta)
                torch.testing.assert_close(scaled, alpha * bare + beta * term, rtol=0.02, atol=0.05)


def test_operands_that_do_not_fit_are_refused() -> None:
    x, w = quantized(5, 384), quantized(256, 384, block=SQUARE)
    for a, b, message in (
        (x, w, r"cannot multiply \[5, 384\] by \[256, 384\]: the inner sizes 384 and 256 differ"),
        (x, quantized(2, 384, 256, block=SQUARE), "right operand has 3 dimensions"),
        (x, quantized(256, 384, block=SQUARE, recipe=POWER_OF_TWO).t(), "mixed recipes"),
        (quantized(5, 384, rowwise=False), w.t(), "without its rowwise form"),
    ):
        with pytest.raises(ValueError, match=message):
            torch.ops.aten.mm(a, b)
    with pytest.raises(ValueError, match=r"the bias has shape \[5\]: expected \[256\]"):
        torch.ops.aten.addmm(randn(5), x, w.t())
    with torch.inference_mode():  # where composite ops arrive whole
        for op, *operands in (("matmul", x, w.dequantize()[None]), ("linear", x, w, w)):
            with pytest.raises(NotImplementedError, match=rf"aten\.{op}\.default .*"):
                getattr(torch.ops.aten, op)(*operands)


W, B, A = randn(256, 384, seed=1), randn(256, 4, seed=2), randn(4, 384, seed=3)
ADAPTED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "w + b a": lambda w, b, a: w + b @ a,
    "b a + w": lambda w, b, a: torch.add(b @ a, w, alpha=2),
    "w - b a": lambda w, b, a: w - b @ a,
    "fp32 delta": lambda w, b, a: w + b.float() @ a.float(),
    "addmm": lambda w, b, a: torch.addmm(w, b, a, alpha=0.5),
    "Tensor.addmm": lambda w, b, a: w.addmm(b, a, beta=0.25),
    "addmm by names": lambda w, b, a: torch.addmm(input=w, mat1=b, mat2=a),
    "addbmm": lambda w, b, a: torch.addbmm(w, b[None], a[None], alpha=3),
    "addr": lambda w, b, a: torch.addr(w, b[:, 0], a[0]),
    "baddbmm": lambda w, b, a: torch.baddbmm(w[None], b[None], a[None], alpha=0.5)[0],
    "Tensor.baddbmm": lambda w, b, a: w[None].baddbmm(b[None], a[None])[0],
}
"""A weight, and a product of plain tensors that is added to it."""


@pytest.mark.parametrize("kind", ["weight", "weight without a gradient", "tensor"])
@pytest.mark.parametrize("name", ADAPTED)
def test_a_weight_that_a_product_is_added_to_is_a_weight(name: str, kind: str) -> None:
    if kind == "tensor" and "baddbmm" in name:
        return  # stacks: below
    held, grad = both_kinds(W)[kind.split()[0]], randn(5, 256, seed=4)
    held.requires_grad_(kind == "weight")
    values = (held.dequantize() if kind == "tensor" else plain(held)).requires_grad_()
    b, a = (t.clone().requires_grad_() for t in (B, A))
    sums, exact = (ADAPTED[name](w, b, a) for w in (held, values))
    assert isinstance(sums, BlockwiseFP8Weight)
    assert torch.equal(plain(sums), exact)
    x, grad = randn(5, 384).to(sums.dtype), grad.to(sums.dtype)
    y = F.linear(x, sums)
    wanted, _, dw = composed(x, exact.detach(), grad)
    assert torch.equal(y, wanted)
    made = torch.autograd.grad(y, (b, a, *([held] if kind == "weight" else [])), grad)
    for got, want in zip(made, torch.autograd.grad(exact, (b, a, values), dw), strict=False):
        assert torch.equal(got, want)


def test_without_gradients_only_the_sum_with_a_frozen_weight_is_a_weight() -> None:
    """Optimizers and averages compute with masters there, and write to no frozen weight."""
    kinds = both_kinds(W)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            made, sums = ([w + B @ A, w - 1] for w in (kinds["weight"], kinds["tensor"]))
            assert [type(x) for x in made] == [Tensor, Tensor]
            assert [type(x) for x in sums] == [BlockwiseFP8Weight, BlockwiseFP8Weight]
            for run in (lambda w: w * 2, lambda w: w + torch.ones(2, *w.shape)):
                with pytest.raises(NotImplementedError, match="is not implemented for"):
                    run(kinds["tensor"])


def test_what_is_computed_from_a_weight_has_its_recipe() -> None:
    w = BlockwiseFP8Weight(W, POWER_OF_TWO).requires_grad_()
    for made in (w + B @ A, w * 2, torch.addmm(w, B, A), w.t() + (B @ A).t()):
        assert isinstance(made, BlockwiseFP8Weight)
        assert made.recipe == POWER_OF_TWO


def test_a_stack_that_products_are_added_to_is_a_stack() -> None:
    w = BlockwiseFP8Weight(randn(3, 256, 384, seed=1))
    b, a = (t.expand(3, *t.shape).clone().requires_grad_() for t in (B, A))
    sums, exact = (torch.baddbmm(t, b, a, alpha=2) for t in (w, plain(w)))
    assert isinstance(sums, BlockwiseFP8Weight)
    assert torch.equal(plain(sums), exact)
    x = randn(3, 16, 384)
    y = torch.bmm(x, sums.mT)
    for i in range(3):
        assert torch.equal(y[i], F.linear(x[i], BlockwiseFP8Weight(exact[i].detach())))
    y.sum().backward()
    assert all(t.grad is not None and t.grad.count_nonzero() for t in (b, a))


def test_products_are_added_to_a_frozen_stack_by_its_matmuls() -> None:
    w = BlockwiseFP8Tensor.from_values(randn(3, 256, 384, seed=1), (128, 128))
    b, a = (t.expand(3, *t.shape).clone().requires_grad_() for t in (B, A))
    sums = torch.baddbmm(w, b, a, alpha=2)
    assert isinstance(sums, AdaptedWeight)
    x = randn(3, 16, 384)
    y = torch.bmm(x, sums.mT)
    exact = torch.bmm(x, w.mT).float() + 2 * torch.bmm(x.float(), (b.float() @ a.float()).mT)
    torch.testing.assert_close(
        y.float(), exact, rtol=0.02, atol=0.02 * exact.detach().abs().max().item()
    )
    y.sum().backward()
    assert all(t.grad is not None and t.grad.count_nonzero() for t in (b, a))


def test_what_is_added_to_is_not_written_where_it_is_frozen() -> None:
    w, master = both_kinds(W)["tensor"], both_kinds(W)["weight"]
    with torch.no_grad():
        for made in (torch.addmm(w, B, A), w + B @ A):
            assert isinstance(made, BlockwiseFP8Weight)
        for add in (lambda: w.addmm_(B, A), lambda: w.add_(B @ A)):
            with pytest.raises(NotImplementedError, match=r"blocktensor\.unfreeze"):
                add()
        with pytest.raises(NotImplementedError, match="no FP8 path"):
            in_a_layer(torch.ops.aten.addmm_)(master, B, both_kinds(A)["weight"])
        assert torch.equal(plain(master.addmm_(B, A)), torch.addmm(W, B, A))
    for other in (randn(2, 256, 384), w, W.double()):  # no weight of its shape, dtype, or plain
        with pytest.raises(NotImplementedError, match=r"\.dequantize\(\)"):
            w + other
