"""What every backward does: who sees the gradient, what is computed, what raises."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.distributed.pipelining import stage
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional, quantize
from blocktensor.autograd import pipelining
from blocktensor.autograd.backward import FP8Function
from blocktensor.autograd.norm import normed
from blocktensor.tensor.fp8_tensor import Generation
from tests.support.asserts import refused
from tests.support.groups import ends
from tests.support.linear_ways import (
    HIGH,
    assert_all_equal,
    gone_when,
    grads_of,
    run_linears,
    storage_is_gone,
    way_of_linears,
)
from tests.support.models import FP32_SCALES, Trace, linear, randn
from tests.support.numeric import assert_same

__all__ = ["way_of_linears"]
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


def leaf(*shape: int, seed: int = 1) -> Tensor:
    return randn(*shape, seed=seed, grad=True)


def samples() -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], tuple[int, ...]]]:
    """Functions, their leaves, and the number of products of each leaf's gradient alone."""
    x, offs, target = leaf(70, 192), ends(30, 0, 40), torch.arange(70)
    mlp = leaf(160, 192), leaf(160, 192, seed=2), leaf(192, 160)
    experts = leaf(3, 160, 192), leaf(3, 160, 192, seed=2), leaf(3, 192, 160)
    biases = leaf(160), leaf(160), leaf(192)
    f = functional
    return {
        "linear": (f.linear, (x, mlp[0], leaf(160)), (1, 1, 0)),
        "grouped_linear": (
            lambda x, w, b: f.grouped_linear(x, w, offs, b),
            (x, experts[0], leaf(3, 160)),
            (1, 1, 0),
        ),
        "gated_mlp": (f.gated_mlp, (x, *mlp), (3, 2, 2, 1)),
        "gated_mlp, biases": (f.gated_mlp, (x, *mlp, *biases), (3, 2, 2, 1, 1, 1, 0)),
        "gated_mlp, gate and up in one": (
            lambda x, w, down: f.gated_mlp(x, w, None, down),
            (x, leaf(320, 192), mlp[2]),
            (2, 2, 1),
        ),
        "gated_experts": (
            lambda x, *ws: f.gated_experts(x, *ws, offs),
            (x, *experts),
            (3, 2, 2, 1),
        ),
        "normed": (lambda x, w: normed(x, w, 1e-6, "llama"), (x, leaf(192)), (0, 0)),
        "linear_cross_entropy": (
            lambda x, w, b: f.linear_cross_entropy(x, w, target, b),
            (x, mlp[0], leaf(160)),
            (0, 0, 0),
        ),
    }


NAMES = [*samples()]
BOTH_WAYS = ("linear", "gated_mlp", "gated_experts")  # to which the size of gradients matters


@pytest.fixture(params=[*NAMES, *(f"{name}; sequence" for name in BOTH_WAYS)])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One of ``NAMES``, whose linears run one way or the other."""
    name, _, way = request.param.partition("; ")
    run_linears(way or "op by op", monkeypatch)
    return name


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


# Backwards in halves, as zero-bubble schedules of torch's pipelining run them

needs_halves = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="before 2.13 torch loses an autograd.Function between the halves (pytorch#166577)",
)


@needs_halves
def test_a_split_backward_computes_each_product_once(name: str) -> None:
    run, (x, *weights), products = samples()[name]
    y = run(x, *weights)
    grad = randn(*y.shape, seed=5).to(y.dtype)
    wanted = torch.autograd.grad(y, (x, *weights), grad, retain_graph=True)
    with Trace() as of_input:
        (dx,), groups = stage.stage_backward_input([y], [grad], [x], iter(weights))
    with Trace() as of_weights:
        stage.stage_backward_weight(iter(weights), groups)
    for a, b in zip((dx, *(w.grad for w in weights)), wanted, strict=True):
        assert_same(a, b)
    assert of_input.count("gemm") == products[0]
    of_matrices = sum(w.ndim > 1 + ("experts" in name or "grouped" in name) for w in weights)
    assert of_weights.count("gemm") == (of_matrices if products[0] else 0)


USES: dict[str, Callable[[Tensor, Any, Tensor], Tensor]] = {
    "a linear": F.linear,
    "a view": lambda x, w, bias: x @ w + bias,
    "a linear and a view": lambda x, w, bias: F.linear(x, w, bias) @ w,
    "a linear and a penalty": lambda x, w, bias: (
        F.linear(x, w, bias) + w.high_precision().square().mean()
    ),
    "two linears": lambda x, w, bias: F.linear(torch.tanh(F.linear(x, w)), w, bias),
    "two linears of a copy": lambda x, w, bias: F.linear(
        F.linear(x.float(), w.float()), w.float(), bias.float()
    ),
}


@needs_halves
@in_each_way
@pytest.mark.parametrize("recipe", [FP32_SCALES, HIGH], ids=str)
@pytest.mark.parametrize("use", USES)
def test_gradients_are_those_of_a_whole_backward(use: str, recipe: Recipe) -> None:
    found = []
    for split in (False, True):
        module, x = linear(300, 300, bias=True, recipe=recipe), randn(40, 300, grad=True)
        for step in range(2):
            y = USES[use](x, module.weight, module.bias)
            grad = randn(40, 300, seed=step, dtype=y.dtype)
            if split:
                _, groups = stage.stage_backward_input([y], [grad], [x], module.parameters())
                stage.stage_backward_weight(module.parameters(), groups)
            else:
                y.backward(grad)
        found.append([x.grad, *(p.grad for p in module.parameters())])
    assert_all_equal(*found)


@needs_halves
@pytest.mark.parametrize("in_place", [True, False])
def test_a_gradient_that_changes_between_the_halves_is_read_again(in_place: bool) -> None:
    run, (x, *weights), _ = samples()["gated_mlp"]
    y, grad = run(x, *weights), randn(70, 192, seed=5)
    wanted = torch.autograd.grad(y, weights, 2 * grad, retain_graph=True)
    _, groups = stage.stage_backward_input([y], [grad], [x], iter(weights))
    if in_place:
        grad.mul_(2)
    else:
        groups = [{**group, "grads": [(2 * grad,)]} for group in groups]
    stage.stage_backward_weight(iter(weights), groups)
    assert_all_equal([w.grad for w in weights], [*wanted])


def test_an_input_half_is_watched_once_and_no_longer_than_it_runs() -> None:
    pipelining.watch_halves(), pipelining.watch_halves()
    assert not hasattr(stage.stage_backward_input.__wrapped__, "__wrapped__")

    original = mock.Mock(side_effect=RuntimeError("in the middle"))
    with pytest.raises(RuntimeError, match="in the middle"):
        pipelining._watched(original)([])
    assert not pipelining._input_halves


N, K = 256, 192


def weight(seed: int = 0) -> nn.Parameter:
    return nn.Parameter(BlockwiseFP8Weight(randn(N, K, seed=seed), FP32_SCALES))


def loss_of(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).relu().sum()


def checkpointed(x: Tensor, w: Tensor) -> Any:
    return checkpoint(loss_of, x, w, use_reentrant=False)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_grad_of_a_checkpointed_forward(kind: Any) -> None:
    x, w = randn(8, K, grad=True), weight()
    if kind is dict and torch.__version__ < (2, 13):
        pytest.skip("torch.autograd.grad takes no dictionary before torch 2.13")
    wanted = torch.autograd.grad(loss_of(x, w), (x, w))
    inputs = {"x": x, "w": w} if kind is dict else kind((x, w))
    with Trace() as trace:
        got = torch.autograd.grad(checkpointed(x, w), inputs)
    assert trace.count("blocktensor.gemm") == 4  # two of forwards
    assert_all_equal([*(got.values() if isinstance(got, dict) else got)], [*wanted])
    (alone,) = torch.autograd.grad(checkpointed(x, w), w)
    assert torch.equal(alone, wanted[1])


def test_backward_of_a_checkpointed_forward() -> None:
    x, w = randn(8, K, grad=True), weight()
    (wanted,) = torch.autograd.grad(loss_of(x, w), w)
    for i in range(1, 3):
        checkpointed(x, w).backward(inputs=[w])
        assert torch.equal(w.grad, wanted * i)
    torch.autograd.backward([checkpointed(x, w)], inputs=w)
    assert torch.equal(w.grad, wanted * 3)
    assert x.grad is None


def test_what_is_not_used() -> None:
    x, w, other = randn(8, K, grad=True), weight(), weight(1)
    y, frozen = loss_of(x, w), weight().requires_grad_(False)
    assert torch.autograd.grad(y, other, allow_unused=True, retain_graph=True) == (None,)
    (zeros,) = torch.autograd.grad(y, other, materialize_grads=True, retain_graph=True)
    assert zeros.shape == other.shape and not zeros.any()
    with pytest.raises(RuntimeError, match="have been used in the graph"):
        torch.autograd.grad(y, other, retain_graph=True)
    with pytest.raises(RuntimeError, match="require grad"):
        torch.autograd.grad(y, frozen)


def test_fp8_outputs_and_inputs_in_between() -> None:
    x, w = randn(8, K, grad=True), weight()
    y = quantize(x * 2, FP32_SCALES)
    assert isinstance(y, BlockwiseFP8Tensor)
    grad = randn(8, K, seed=4)
    assert torch.equal(torch.autograd.grad(y, x, grad, retain_graph=True)[0], grad * 2)
    of_y, of_x = torch.autograd.grad(F.linear(y, w).sum(), (y, x))
    assert torch.equal(of_x, of_y * 2)
    y, grad = quantize(checkpoint(F.linear, x, w, use_reentrant=False), FP32_SCALES), randn(8, N)
    got = torch.autograd.grad(y, (x, w), grad, retain_graph=True, materialize_grads=True)
    y.backward(grad)
    for found in (got, (x.grad, w.grad)):
        assert_all_equal([*found], [*torch.autograd.grad(F.linear(x, w), (x, w), grad)])


GATHERED: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "linear": ((256, 384), functional.linear),
    "matmul": ((256, 384), lambda x, w: x @ w.t()),
    "in another dtype": ((256, 384), lambda x, w: F.linear(x, w.float().bfloat16())),
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
