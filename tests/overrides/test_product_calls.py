"""Options of products: ``out=``, ``out_dtype=``, a sum in place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight
from tests.support.models import Trace, in_a_layer, linear, plain, randn

INTO: dict[str, Callable[..., Any]] = {
    "mm": lambda x, w, **out: torch.mm(x, w.t(), **out),
    "matmul": lambda x, w, **out: torch.matmul(x, w.mT, **out),
    "matmul, a weight on the left": lambda x, w, **out: torch.matmul(w, x.t(), **out),
    "addmm": lambda x, w, **out: torch.addmm(x[:, :256], x, w.t(), beta=2, **out),
    "addmm, a bias": lambda x, w, **out: torch.addmm(x[0, :256], x, w.t(), **out),
    "bmm": lambda x, w, **out: torch.bmm(x[None], w[None].mT, **out),
    "baddbmm": lambda x, w, **out: torch.baddbmm(x[None, :, :256], x[None], w[None].mT, **out),
    "mm, another dtype": lambda x, w, **out: torch.mm(x, w.t(), out_dtype=torch.float32, **out),
    "addmm, a weight that is added to": lambda x, w, **out: torch.addmm(
        w, x.new_ones(256, 1), x[:1], **out
    ),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", INTO)
def test_products_into_a_given_tensor(name: str, frozen: bool) -> None:
    if frozen and "bmm" in name:
        return  # a frozen matrix is no stack
    w, x, run = linear(256, 384, frozen=frozen).weight, randn(5, 384), INTO[name]
    with torch.set_grad_enabled(frozen):  # then nothing requires a gradient
        wanted = plain(run(x, w))
        for out in (torch.full_like(wanted, 7), wanted.new_empty(0)):
            address = out.data_ptr()
            assert run(x, w, out=out) is out
            assert torch.equal(out, wanted)
            assert not address or out.data_ptr() == address
        assert torch.equal(plain(run(x, w, out=None)), wanted)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_tensor_that_a_product_does_not_fit_into_is_refused(frozen: bool) -> None:
    w, x = linear(256, 384, frozen=frozen).weight, randn(5, 384)
    with torch.no_grad():
        for out in (torch.zeros(5, 256), randn(5, 384)):
            before = out.clone()
            message = f"makes torch.bfloat16 [5, 256], and out is {out.dtype} {list(out.shape)}:"
            with pytest.raises(ValueError, match=re.escape(message)):
                torch.mm(x, w.t(), out=out)
            assert torch.equal(out, before)
        with pytest.raises(NotImplementedError, match="no FP8 path"):
            in_a_layer(torch.tensordot)(x, w, 1, out=randn(5, 256))
    for x_grad, out_grad in ((True, False), (False, True)):
        with pytest.raises(RuntimeError, match=r"mm\(\.\.\., out=\.\.\.\) has no gradient"):
            torch.mm(x.requires_grad_(x_grad), w.t(), out=randn(5, 256, grad=out_grad))


def test_a_plain_product_into_a_weight_is_written_to_its_master() -> None:
    w, a, b = linear(256, 384).weight, randn(256, 64), randn(64, 384, seed=1)
    with torch.no_grad():
        assert torch.mm(a, b, out=w) is w
        made = torch.addmm(input=w, mat1=a, mat2=b)
    assert torch.equal(w.master, a @ b)
    assert torch.equal(plain(made), torch.addmm(w.master, a, b))


SUMS: dict[str, Callable[..., Tensor]] = {
    "addmm_": lambda add, acc, x, w: add(acc, x, w.t()),
    "with factors": lambda add, acc, x, w: add(acc, x, w.t(), beta=0.5, alpha=2),
    "of anything": lambda add, acc, x, w: add(acc.fill_(torch.nan), x, w.t(), beta=0),
    "by name": lambda add, acc, x, w: add(acc, mat1=x, mat2=w.t()),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_a_product_is_added_in_place(name: str, frozen: bool) -> None:
    w, x, acc = linear(256, 384, frozen=frozen).weight, randn(5, 384), randn(5, 256, seed=3)
    run = in_a_layer(SUMS[name])
    with torch.no_grad():
        wanted = run(torch.addmm, acc.clone(), x, w)
        with Trace() as trace:
            assert run(Tensor.addmm_, acc, x, w) is acc
    assert trace.count("blocktensor.gemm") == 1
    assert torch.equal(acc, wanted)
    assert acc.isfinite().all()


def test_a_sum_in_place_has_gradients() -> None:
    w, x, term = linear(256, 384).weight, randn(5, 384, grad=True), randn(5, 256, grad=True)
    sums = torch.addmm(term, x, w.t()), term.clone().addmm_(x, w.t())
    assert all(map(torch.equal, *(torch.autograd.grad(y.sum(), (w, x, term)) for y in sums)))


def test_stacks_are_added_in_place() -> None:
    stack = nn.Parameter(BlockwiseFP8Weight(randn(2, 256, 384)))
    x, acc = randn(2, 5, 384), randn(2, 5, 256, seed=3)
    with torch.no_grad():
        baddbmm, baddbmm_ = in_a_layer(torch.baddbmm), in_a_layer(Tensor.baddbmm_)
        wanted = baddbmm(acc, x, stack.mT)
        assert torch.equal(baddbmm_(acc, x, stack.mT), wanted)
        row = acc[:, :1]
        on_the_left = baddbmm(row.mT[:, :1, :1].expand(2, 1, 5), stack, x.mT)
        assert torch.equal(on_the_left, in_a_layer(torch.bmm)(stack, x.mT) + row[..., :1])
        stack.baddbmm_(randn(2, 256, 4), randn(2, 4, 384))  # as adapters are merged
    assert type(stack) is BlockwiseFP8Weight


@pytest.mark.parametrize("frozen", [False, True])
def test_a_product_in_fp32_is_not_rounded(frozen: bool) -> None:
    w, x, acc = linear(256, 384, frozen=frozen).weight, randn(5, 384), torch.ones(5, 256)
    wanted = F.linear(x.float(), w.float()) + 1
    with torch.no_grad(), Trace() as trace:
        addmm = in_a_layer(torch.addmm)
        made = addmm(acc, x, w.t(), out_dtype=torch.float32, out=acc)
    assert made is acc and trace.count("blocktensor.gemm") == 1
    assert torch.equal(acc, wanted.detach())
    assert not torch.equal(acc, torch.ones(5, 256).add(x @ w.t()))
    with pytest.raises(TypeError, match=r"out_dtype=torch\.float64: expected"):
        torch.mm(x, w.t(), out_dtype=torch.float64)
    with pytest.raises(TypeError, match=r"has dtype torch\.int32"):
        torch.mm(x.int(), w.t(), out_dtype=torch.float32)
