"""Options of products: ``out=``, ``out_dtype=``, a sum in place, a weight multiplied by itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight
from tests.support.compiling import afresh
from tests.support.models import Trace, linear, plain, randn

__all__ = ["afresh"]

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
            torch.tensordot(x, w, 1, out=randn(5, 256))
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


OWN: dict[str, Callable[[Any], Any]] = {
    "p.detach() @ p.T": lambda p: p.detach() @ p.T,
    "in fp32": lambda p: p.data.float() @ p.data.float().T,
    "of a copy": lambda p: (lambda x: x @ x.T)(p.clone()),
    "of a normalised copy": lambda p: (lambda x: x @ x.T)(p / p.norm()),
    "mm": lambda p: torch.mm(p.t(), p),
    "addmm": lambda p: torch.addmm(torch.eye(256, dtype=p.dtype), p, p.t(), beta=-1),
    "F.linear": lambda p: F.linear(p, p),
    "einsum": lambda p: torch.einsum("ij,ik->jk", p, p),
    "multi_dot": lambda p: torch.linalg.multi_dot([p, p.T, p]),
    "a part": lambda p: p[:128] @ p[:128].T,
    "stacks": lambda p: torch.bmm(p[None], p[None].mT),
    "matmul of stacks": lambda p: p[None].mT @ p[None],
}
"""An optimizer's products of a weight with itself."""


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", OWN)
def test_products_of_a_weight_with_itself_are_in_high_precision(name: str, off: Any) -> None:
    p = linear(256, 384).weight
    with off():
        wanted = OWN[name](plain(p))
        assert torch.equal(OWN[name](p), wanted)
        if off is torch.no_grad:
            compiled = torch.compile(OWN[name], backend="aot_eager", fullgraph=True)
            assert torch.equal(compiled(p), wanted)


def test_other_products_of_a_weight_stay_in_fp8() -> None:
    p, other, x = linear(256, 384).weight, linear(256, 384).weight, randn(5, 384)
    for off in (torch.no_grad, torch.inference_mode):
        with off(), Trace() as trace:
            x @ p.t(), p @ x.t(), torch.addmm(p, p, randn(384, 384)), other @ p.t()
        assert trace.count("blocktensor.gemm") == 4
    with Trace() as trace:
        p @ p.t()
    assert trace.count("blocktensor.gemm") == 1  # it may have a gradient
    # Checkpointing runs its first pass under no_grad: one weight of two layers, not of itself.
    square, x = linear(256, 256).weight, randn(5, 256)
    with torch.no_grad(), Trace() as trace:
        F.linear(F.linear(x, square), square)
    assert trace.count("blocktensor.gemm") == 2


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
    with torch.no_grad():
        wanted = SUMS[name](torch.addmm, acc.clone(), x, w)
        with Trace() as trace:
            assert SUMS[name](Tensor.addmm_, acc, x, w) is acc
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
        wanted = torch.baddbmm(acc, x, stack.mT)
        assert torch.equal(acc.baddbmm_(x, stack.mT), wanted)
        row = acc[:, :1]
        on_the_left = torch.baddbmm(row.mT[:, :1, :1].expand(2, 1, 5), stack, x.mT)
        assert torch.equal(on_the_left, torch.bmm(stack, x.mT) + row[..., :1])
        stack.baddbmm_(randn(2, 256, 4), randn(2, 4, 384))  # as adapters are merged
    assert type(stack) is BlockwiseFP8Weight


@pytest.mark.parametrize("frozen", [False, True])
def test_a_product_in_fp32_is_not_rounded(frozen: bool) -> None:
    w, x, acc = linear(256, 384, frozen=frozen).weight, randn(5, 384), torch.ones(5, 256)
    wanted = F.linear(x.float(), w.float()) + 1
    with torch.no_grad(), Trace() as trace:
        made = torch.addmm(acc, x, w.t(), out_dtype=torch.float32, out=acc)
    assert made is acc and trace.count("blocktensor.gemm") == 1
    assert torch.equal(acc, wanted.detach())
    assert not torch.equal(acc, torch.ones(5, 256).add(x @ w.t()))
    with pytest.raises(TypeError, match=r"output dtype torch\.float64: expected"):
        torch.mm(x, w.t(), out_dtype=torch.float64)
    with pytest.raises(TypeError, match=r"has dtype torch\.int32"):
        torch.mm(x.int(), w.t(), out_dtype=torch.float32)
