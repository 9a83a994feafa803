"""What every backward does: who sees the gradient, what is computed, what raises."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo import compiled_autograd

from blocktensor import BlockwiseFP8Tensor, functional
from blocktensor.autograd.backward import FP8Function
from blocktensor.tensor.fp8_tensor import Generation
from tests.support.asserts import refused
from tests.support.differentiable import NAMES, name, samples
from tests.support.groups import ends
from tests.support.linear_ways import (
    assert_all_equal,
    gone_when,
    grads_of,
    storage_is_gone,
    way_of_linears,
)
from tests.support.models import Trace, linear, randn
from tests.support.numeric import assert_same

__all__ = ["name", "way_of_linears"]
in_each_way = pytest.mark.usefixtures("way_of_linears")


@in_each_way
def test_the_outputs_gradient_can_be_asked_for() -> None:
    module, x, w = linear(256, 384), randn(5, 384, grad=True), randn(5, 256, seed=9)
    y = module(x)
    dy, dx = torch.autograd.grad((y * w).sum(), [y, x])
    assert_all_equal([dy, dx], [w, grads_of(module, x, w)[1]])


@in_each_way
def test_backward_in_other_threads(device: torch.device) -> None:
    module = linear(256, 384, device=device)
    x, grad = randn(5, 384, device=device), randn(5, 256, seed=3, device=device)
    _, dx, dw = grads_of(module, x, grad)
    leaves = [x.clone().requires_grad_() for _ in range(4)]
    outputs = [module(leaf) for leaf in leaves]
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(
            lambda y, leaf: torch.autograd.grad(y, [leaf, module.weight], grad), outputs, leaves
        )
    for result in results:
        assert_all_equal(list(result), [dx, dw])


def test_a_weights_bytes_are_gone_when_its_gradient_is_computed(
    way_of_linears: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Callable[[], bool]] = []
    gone = gone_when(monkeypatch, "gemm", held)
    module = linear(128, 192, dtype=torch.float32)
    loss = module(randn(9, 192, dtype=torch.float32, grad=True)).sum()
    assert module.weight.cache.held().rowwise is None  # fprop alone reads it
    held.append(storage_is_gone(module.weight.cache.held().columnwise.data))
    loss.backward()
    assert gone == [False, way_of_linears == "op by op"]


def test_a_gradient_is_freed_before_the_products(
    way_of_linears: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From torch 2.13 on, and but for small linears, whose backward is one sequence."""
    held: list[Callable[[], bool]] = []
    gone = gone_when(monkeypatch, "gemm", held)
    y = linear(256, 384)(randn(5, 384, grad=True))
    y.register_hook(lambda g: held.append(storage_is_gone(g)))
    y.square().sum().backward()
    boxes = hasattr(torch.autograd.Function, "boxed_grads_call")
    assert gone == 2 * [way_of_linears == "op by op" and boxes]


def test_only_the_gradients_that_are_asked_for_are_computed(name: str) -> None:
    """By autograd.grad and by backward(inputs=...), with the bits of a whole backward."""
    run, leaves, products = samples()[name]
    y = run(*leaves)
    grad = randn(*y.shape, seed=5).to(y.dtype)
    wanted = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    for each, alone, count in zip(leaves, wanted, products, strict=True):
        with Trace() as trace:
            (got,) = torch.autograd.grad(y, each, grad, retain_graph=True)
        assert_same(got, alone)
        assert trace.count("gemm") == count
        y.backward(grad, inputs=[each], retain_graph=True)
        assert_same(each.grad, alone)
        assert [t.grad is None for t in leaves].count(False) == 1
        each.grad = None


def test_second_derivatives_raise_on_every_path(name: str) -> None:
    run, leaves, _ = samples()[name]

    def loss(*leaves: Tensor) -> Tensor:
        return run(*leaves).float().square().sum()

    message = "second derivative is not implemented"
    for each in leaves:
        with pytest.raises(NotImplementedError, match=message):
            torch.autograd.grad(loss(*leaves), each, create_graph=True)
    x, *rest = leaves
    v, of_x = torch.randn_like(x), lambda x: loss(x, *rest)
    of_two = torch.autograd.functional.hvp, torch.autograd.functional.vhp
    for product in (*of_two, torch.autograd.functional.jvp):
        with pytest.raises(NotImplementedError, match=message):
            product(of_x, x, v)
    with pytest.raises(NotImplementedError, match=message):
        torch.autograd.functional.hessian(of_x, x)


def test_batched_gradients_are_refused_and_only_they(name: str) -> None:
    run, leaves, _ = samples()[name]
    y = run(*leaves)
    grads = torch.stack([randn(*y.shape, seed=seed).to(y.dtype) for seed in range(3)])

    def batched(*inputs: Tensor) -> Any:
        return torch.autograd.grad(y, inputs, grads, retain_graph=True, is_grads_batched=True)

    (text,) = {refused(lambda given=given: batched(*given)) for given in (leaves, leaves[1:])}
    assert_expected_inline(
        text,
        """\
NotImplementedError: torch.autograd.grad(..., is_grads_batched=True) through an FP8 linear
  layer, whose casts take one gradient: call it once for each gradient, with retain_graph=True""",
    )
    assert all(dt is not None for dt in torch.autograd.grad(y, leaves, grads[0]))


def test_every_hook_of_the_node_sees_the_gradient_and_may_change_it(name: str) -> None:
    run, leaves, _ = samples()[name]
    y = run(*leaves)
    grad, seen = randn(*y.shape, seed=5).to(y.dtype), []
    wanted = torch.autograd.grad(y, leaves, 2 * grad, retain_graph=True)
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda grads: seen.append(grads[0].clone()))
    y.grad_fn.register_prehook(lambda grads: (2 * grads[0],))
    y.grad_fn.register_prehook(lambda grads: seen.append(grads[0].clone()))
    got = torch.autograd.grad(y, leaves, grad)
    for a, b in zip((*seen, *got), (grad, 2 * grad, *wanted), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize(
    "name",
    [  # a norm that is repeated is refused: test_repeat.py
        pytest.param(name, marks=[pytest.mark.not_repeated] * (name == "normed")) for name in NAMES
    ],
)
def test_compiled_autograd_gives_the_bits_of_autograd(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FP8Function, "boxed_grads_call", True)  # from its first use on False
    run, leaves, _ = samples()[name]
    grad = randn(*run(*leaves).shape, seed=5)
    run(*leaves).backward(grad)
    wanted = [x.grad for x in leaves]
    for x in leaves:
        x.grad = None
    y = run(*leaves)
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        y.backward(grad)
    for x, each in zip(leaves, wanted, strict=True):
        assert_same(x.grad, each)


def forward(x: Tensor, w: Tensor) -> Tensor:
    """A copy in another dtype shares the weight's bytes in a layer alone: in a ``forward``."""
    return F.linear(x, w.float().bfloat16())


GATHERED: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "linear": ((256, 384), functional.linear),
    "matmul": ((256, 384), lambda x, w: x @ w.t()),
    "in another dtype": ((256, 384), forward),
    "a part": ((256, 384), lambda x, w: F.linear(x, w[128:])),
    "experts": ((2, 256, 384), lambda x, w: functional.grouped_linear(x, w, ends(2, 3))),
    "loss": (
        (256, 384),
        lambda x, w: functional.linear_cross_entropy(x, w, torch.arange(5)),
    ),
}


@pytest.mark.parametrize("name", GATHERED)
def test_a_gathered_weight_must_hold_the_values_of_its_forward(name: str) -> None:
    shape, run = GATHERED[name]
    w = BlockwiseFP8Tensor.from_values(randn(*shape), (128, 128))
    w.generation = Generation()  # as of a weight that FSDP2 has gathered
    x = randn(5, 384, grad=True)
    with pytest.raises(RuntimeError, match="was changed between a forward and a backward"):
        run(x, w)
    results = []
    for change in (0, 1):
        w.generation.version = 7
        y = run(x, w)
        w.generation.version += change
        if change and name != "loss":  # which has computed its gradients
            with pytest.raises(RuntimeError, match="was changed or moved on this rank"):
                y.sum().backward()
        else:
            results.append(torch.autograd.grad(y.sum(), x)[0])
    assert all(torch.equal(made, results[0]) for made in results)
