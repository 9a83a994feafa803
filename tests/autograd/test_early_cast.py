"""The gradient of a linear's output: who sees it, who changes it, and when its bytes are gone."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import functional
from blocktensor.ops import reference
from tests.support.linear_ways import assert_all_equal, grads_of, way_of_linears
from tests.support.models import linear, randn
from tests.support.reference_ops import replace_op

__all__ = ["way_of_linears"]


class Ends(torch.autograd.Function):
    """The identity, whose gradient is None."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("bias", [False, True])
def test_where_no_gradient_arrives_none_leaves(bias: bool) -> None:
    module, x = linear(256, 384, bias=bias), randn(5, 384, grad=True)
    Ends.apply(module(x)).sum().backward()
    assert all(t.grad is None for t in (x, *module.parameters()))
    assert module.weight.cache.nbytes() == 0


def test_hooks_on_the_output_see_and_change_the_plain_gradient() -> None:
    module, x, grad = linear(256, 384), randn(5, 384), randn(5, 256, seed=9)
    seen: list[Tensor] = []

    def hooked(m: nn.Module, t: Tensor) -> Tensor:
        y = m(t)
        y.retain_grad()
        y.register_hook(lambda g: seen.append(g.clone()))
        y.register_hook(lambda g: 2 * g)
        y.register_hook(lambda g: seen.append(g.clone()))
        seen.append(y)
        return y

    doubled = grads_of(module, x, grad, hooked)
    y, before, after = seen
    assert_all_equal([before, after, y.grad], [grad, 2 * grad, 2 * grad])
    assert_all_equal(doubled[1:], grads_of(module, x, 2 * grad)[1:])


def test_the_outputs_gradient_can_be_asked_for() -> None:
    module, x, w = linear(256, 384), randn(5, 384, grad=True), randn(5, 256, seed=9)
    y = module(x)
    dy, dx = torch.autograd.grad((y * w).sum(), [y, x])
    assert_all_equal([dy, dx], [w, grads_of(module, x, w)[1]])


def test_backward_in_other_threads(device: torch.device) -> None:
    module = linear(256, 384, device=device)
    x, grad = randn(5, 384, device=device), randn(5, 256, seed=3, device=device)
    _, dx, dw = grads_of(module, x, grad)
    leaves = [x.clone().requires_grad_() for _ in range(4)]
    outputs = [module(leaf) for leaf in leaves]
    results: list[tuple[Tensor, ...]] = []
    threads = [
        threading.Thread(
            target=lambda y, t: results.append(torch.autograd.grad(y, [t, module.weight], grad)),
            args=pair,
        )
        for pair in zip(outputs, leaves, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        assert_all_equal(list(result), [dx, dw])


def test_a_weights_bytes_are_gone_when_its_gradient_is_computed(
    way_of_linears: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those of small linears, whose backward is one sequence."""
    gemm, columnwise, gone = reference.gemm, [], []

    def watched(*args: Any) -> Tensor:
        gone.extend(ref() is None for ref in columnwise)
        return gemm(*args)

    replace_op(monkeypatch, "gemm", watched)
    module = linear(128, 192, dtype=torch.float32)
    loss = module(randn(9, 192, dtype=torch.float32, grad=True)).sum()
    assert module.weight.cache.held().rowwise is None  # fprop alone reads it
    columnwise.append(weakref.ref(module.weight.cache.held().columnwise.data))
    loss.backward()
    assert gone == [False, way_of_linears != "sequence"]


class Stopped(Exception):
    pass


def stop(grads: Any) -> None:
    raise Stopped


@pytest.mark.parametrize("then", ["no gradient", "create_graph", "an FP8 gradient"])
def test_a_backward_that_failed_leaves_no_cast_to_the_next(then: str) -> None:
    module, leaf = linear(256, 384), randn(5, 384, grad=True)
    first, second = randn(5, 256, seed=3), randn(5, 256, seed=4)
    _, *wanted = grads_of(module, leaf, second)
    module.zero_grad()
    y = module(leaf)
    handle = y.grad_fn.register_prehook(stop)  # after the gradient was cast
    with pytest.raises(Stopped):
        y.backward(first, retain_graph=True)
    handle.remove()
    if then == "no gradient":
        Ends.apply(y).backward(first)
        assert leaf.grad is module.weight.grad is None
        return
    given = functional.quantize(second) if then == "an FP8 gradient" else second
    leaves = leaf, module.weight
    got = torch.autograd.grad(y, leaves, given, create_graph=then == "create_graph")
    assert_all_equal([t.detach() for t in got], wanted)
