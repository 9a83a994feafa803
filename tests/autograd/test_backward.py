"""What every backward does: who sees the gradient, what is computed, what raises."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef

from blocktensor import functional
from blocktensor.autograd.backward import FP8Function
from blocktensor.ops import reference
from tests.support.groups import ends
from tests.support.linear_ways import assert_all_equal, grads_of, way_of_linears
from tests.support.models import Trace, complaint, linear, randn
from tests.support.numeric import assert_same
from tests.support.reference_ops import replace_op
from tests.support.split_backward import needs_halves

__all__ = ["way_of_linears"]


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


# Every function


class Sample(NamedTuple):
    """A function of leaves, and the number of products of each leaf's gradient alone."""

    run: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]
    products: tuple[int, ...]


def leaf(*shape: int, seed: int = 1) -> Tensor:
    return randn(*shape, seed=seed, grad=True)


def samples() -> dict[str, Sample]:
    x, offs = leaf(70, 192), ends(30, 0, 40)
    w, down = leaf(160, 192), leaf(192, 160)
    stack, stack_down = leaf(3, 160, 192), leaf(3, 192, 160)
    target = torch.arange(70)
    return {
        "linear": Sample(functional.linear, (x, w, leaf(160)), (1, 1, 0)),
        "grouped_linear": Sample(
            lambda x, w, b: functional.grouped_linear(x, w, offs, b),
            (x, stack, leaf(3, 160)),
            (1, 1, 0),
        ),
        "gated_mlp": Sample(
            functional.gated_mlp, (x, w, leaf(160, 192, seed=2), down), (3, 2, 2, 1)
        ),
        "gated_mlp, biases": Sample(
            functional.gated_mlp,
            (x, w, leaf(160, 192, seed=2), down, leaf(160), leaf(160), leaf(192)),
            (3, 2, 2, 1, 1, 1, 0),
        ),
        "gated_mlp, gate and up in one": Sample(
            lambda x, w, down: functional.gated_mlp(x, w, None, down),
            (x, leaf(320, 192), down),
            (2, 2, 1),
        ),
        "gated_experts": Sample(
            lambda x, w, up, down: functional.gated_experts(x, w, up, down, offs),
            (x, stack, leaf(3, 160, 192, seed=2), stack_down),
            (3, 2, 2, 1),
        ),
        "rms_norm": Sample(
            lambda x, w: functional.rms_norm(x, w).dequantize(), (x, leaf(192)), (0, 0)
        ),
        "gated_activation": Sample(
            lambda gate, up: functional.gated_activation(gate, up).dequantize(),
            (x, leaf(70, 192, seed=2)),
            (0, 0),
        ),
        "linear_cross_entropy": Sample(
            lambda x, w: functional.linear_cross_entropy(x, w, target), (x, w), (0, 0)
        ),
    }


NAMES = [*samples()]


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_raise_on_every_path(name: str) -> None:
    run, leaves, _ = samples()[name]

    def loss(*leaves: Tensor) -> Tensor:
        return run(*leaves).float().square().sum()

    message = "second derivative is not implemented"
    for each in leaves:
        with pytest.raises(NotImplementedError, match=message):
            torch.autograd.grad(loss(*leaves), each, create_graph=True)
    x, *rest = leaves
    v = torch.randn_like(x)
    for product in (torch.autograd.functional.hvp, torch.autograd.functional.vhp,
                    torch.autograd.functional.jvp):  # fmt: skip
        with pytest.raises(NotImplementedError, match=message):
            product(lambda x: loss(x, *rest), x, v)
    with pytest.raises(NotImplementedError, match=message):
        torch.autograd.functional.hessian(lambda x: loss(x, *rest), x)


@pytest.mark.parametrize("name", NAMES)
def test_batched_gradients_are_refused_and_only_they(name: str) -> None:
    run, leaves, _ = samples()[name]
    y = run(*leaves)
    grads = torch.stack([randn(*y.shape, seed=seed).to(y.dtype) for seed in range(3)])

    def batched(*inputs: Tensor) -> Any:
        return torch.autograd.grad(y, inputs, grads, retain_graph=True, is_grads_batched=True)

    for inputs in (leaves, leaves[1:]):
        text = complaint(NotImplementedError, lambda inputs=inputs: batched(*inputs))
        assert_expected_inline(
            text,
            """\
torch.autograd.grad(..., is_grads_batched=True) through an FP8 linear, whose casts
take one gradient: call it once for each gradient, with retain_graph=True""",
        )
    assert all(dt is not None for dt in torch.autograd.grad(y, leaves, grads[0]))


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", NAMES)
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


@needs_halves
@pytest.mark.parametrize("name", [name for name in NAMES if name != "linear_cross_entropy"])
def test_a_split_backward_computes_each_product_once(name: str) -> None:
    """As pipelining's zero-bubble schedules split it: the input's half, then the weights'."""
    run, (x, *weights), products = samples()[name]
    y = run(x, *weights)
    grad = randn(*y.shape, seed=5).to(y.dtype)
    wanted = torch.autograd.grad(y, (x, *weights), grad, retain_graph=True)
    with Trace() as of_input:
        (dx,), groups = stage_backward_input([y], [grad], [x], iter(weights))
    with Trace() as of_weights:
        stage_backward_weight(iter(weights), groups)
    for a, b in zip((dx, *(w.grad for w in weights)), wanted, strict=True):
        assert_same(a, b)
    assert of_input.count("gemm") == products[0]
    of_matrices = sum(w.ndim > 1 + ("experts" in name or "grouped" in name) for w in weights)
    again = products[0] > 1  # the gradient of h, which the weights of gate and up need too
    assert of_weights.count("gemm") == (of_matrices + again if products[0] else 0)


def test_a_gradient_is_freed_before_the_products(
    way_of_linears: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From torch 2.13 on, and but for small linears, whose backward is one sequence."""
    gemm, gradients, gone = reference.gemm, [], []

    def watched(*args: Any) -> Tensor:
        gone.extend(each.expired() for each in gradients)
        return gemm(*args)

    replace_op(monkeypatch, "gemm", watched)
    y = linear(256, 384)(randn(5, 384, grad=True))
    y.register_hook(lambda g: gradients.append(StorageWeakRef(g.untyped_storage())))
    y.square().sum().backward()
    assert gone == 2 * [
        way_of_linears != "sequence" and hasattr(torch.autograd.Function, "boxed_grads_call")
    ]
