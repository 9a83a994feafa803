"""Layers that ``player.cpp`` repeats: which calls are one kind, and the node that it makes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, freeze, functional
from blocktensor.autograd import gated_mlp, linear
from blocktensor.autograd.shared_cast import SharedCasts
from blocktensor.ops.runtime.specialize import watching
from blocktensor.tensor.adapted import AdaptedWeight, LowRank
from tests.support.groups import ends
from tests.support.linear_ways import run_linears
from tests.support.models import FP32_SCALES, POWER_OF_TWO, plain, randn

K, N = 256, 128
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    run_linears("repeated", monkeypatch)


def weight(
    *shape: int, recipe: Recipe = FP32_SCALES, dtype: torch.dtype = BF16, grad: bool = True
) -> BlockwiseFP8Weight:
    return BlockwiseFP8Weight(
        randn(*(shape or (N, K)), dtype=dtype, seed=3), recipe
    ).requires_grad_(grad)


def is_known(x: Tensor, w: Tensor, bias: Tensor | None = None, offs: Tensor | None = None) -> bool:
    """Whether a call of a linear layer with these operands would be repeated."""
    return linear.repeat.table.plan((x, w, bias, offs, None)) is not None


def test_the_first_call_of_a_kind_makes_the_later_ones_known() -> None:
    functional.linear(randn(9, K, grad=True), weight())
    assert is_known(randn(9, K, seed=1, grad=True), weight())
    y = functional.linear(randn(9, K, seed=1, grad=True), weight())
    assert y.grad_fn is not None and y.grad_fn.name() == "FP8LinearBackward"


@pytest.mark.parametrize("shape", [(70,), (127,), (3, 23), (2, 3, 12)], ids=str)
def test_rows_within_a_step_and_leading_dimensions_make_no_other_kind(shape: Any) -> None:
    functional.linear(randn(66, K, grad=True), weight())
    x, w, grad = randn(*shape, K, grad=True), weight(), randn(*shape, N, seed=1)
    assert is_known(x, w)
    y = functional.linear(x, w)
    assert y.shape == (*shape, N)
    found = torch.autograd.grad(y, (x, w), grad)
    with watching(lambda *_: None):
        wanted = functional.linear(x, w)
    assert torch.equal(y, wanted)
    with watching(lambda *_: None):
        of_wanted = torch.autograd.grad(wanted, (x, w), grad)
    assert [each.shape for each in found] == [x.shape, w.shape]
    assert all(map(torch.equal, found, of_wanted))


CHANGES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "another number of rows": lambda: (randn(10, K, grad=True), weight()),
    "more dimensions": lambda: (randn(3, 3, K, grad=True), weight()),
    "strides": lambda: (randn(K, 9).t().requires_grad_(), weight()),
    "an input without gradient": lambda: (randn(9, K), weight()),
    "a weight without gradient": lambda: (randn(9, K, grad=True), weight(grad=False)),
    "another dtype": lambda: (
        randn(9, K, dtype=torch.float32, grad=True),
        weight(dtype=torch.float32),
    ),
    "another recipe": lambda: (randn(9, K, grad=True), weight(recipe=POWER_OF_TWO)),
    "a transposed weight": lambda: (randn(9, K, grad=True), weight(K, N).t()),
    "a bias": lambda: (randn(9, K, grad=True), weight(), randn(N)),
    "a bias with a gradient": lambda: (randn(9, K, grad=True), weight(), randn(N, grad=True)),
    "groups": lambda: (randn(9, K, grad=True), weight(2, N, K), None, ends(4, 9)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_makes_another_kind(change: str) -> None:
    functional.linear(randn(9, K, grad=True), weight())
    assert not is_known(*CHANGES[change]())


ROWS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "another step": lambda: (randn(129, K, grad=True), weight()),
    "a few": lambda: (randn(9, K, grad=True), weight()),
    "whole steps": lambda: (randn(128, K, grad=True), weight()),
    "not contiguous": lambda: (randn(33, K, 3, grad=True).mT, weight()),
}


@pytest.mark.parametrize("rows", ROWS)
def test_other_rows_that_make_another_kind(rows: str) -> None:
    functional.linear(randn(66, K, grad=True), weight())
    assert not is_known(*ROWS[rows]())


def test_a_frozen_weight_is_another_kind() -> None:
    functional.linear(randn(9, K, grad=True), weight())
    assert not is_known(randn(9, K, grad=True), frozen_weight())


def frozen_weight() -> Tensor:
    module = nn.Linear(K, N, bias=False, dtype=BF16)
    module.weight = nn.Parameter(weight())
    freeze(module)
    return module.weight


@pytest.mark.parametrize("kind", ["frozen", "trained"])
def test_the_gradient_of_x_alone_needs_no_python(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    of_python = linear.repeat._gradients
    monkeypatch.setattr(
        linear.repeat, "_gradients", lambda *args: made.append(args) or of_python(*args)
    )
    w = frozen_weight() if kind == "frozen" else weight()
    x, grad = randn(3, 11, K, grad=True), randn(3, 11, N, seed=1)
    found = [torch.autograd.grad(functional.linear(x, w), x, grad) for _ in range(3)]
    assert made == []
    with watching(lambda *_: None):
        wanted = torch.autograd.grad(functional.linear(x, w), x, grad)
    assert all(torch.equal(each[0], wanted[0]) for each in found)


def test_modes_make_other_kinds() -> None:
    x, w = randn(9, K, grad=True), weight()
    functional.linear(x, w)
    with torch.no_grad():
        assert not is_known(x, w)
    with torch.autocast("cpu", torch.float16):
        assert not is_known(x, w)
    with watching(lambda *_: None):
        assert not is_known(x, w)
    assert is_known(x, w)


def mlp() -> tuple[Any, ...]:
    return weight(N, K), weight(N, K), weight(K, N)


class Kind(NamedTuple):
    """A kind of layer: the name of its node, a call, its weights, and how often it has an x."""

    node: str
    run: Callable[..., Tensor]
    weights: Callable[[], tuple[Any, ...]]
    inputs: int = 1


def with_adapter(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The rows of two groups, multiplied by frozen experts with an adapter."""
    experts = BlockwiseFP8Tensor.from_values(randn(2, N, K, seed=6), (128, 128))
    offs = ends(x.shape[0] // 3, x.shape[0])
    return functional.grouped_linear(x, torch.baddbmm(experts, b, a, alpha=0.5), offs)


def with_adapter_of_one_weight(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Rows, multiplied by a frozen weight with an adapter."""
    w = BlockwiseFP8Tensor.from_values(randn(N, K, seed=6), (128, 128))
    return F.linear(x, AdaptedWeight(w, [LowRank(b, a, 0.5)]))


LAYERS = {
    "linear": Kind("FP8LinearBackward", functional.linear, lambda: (weight(),)),
    "gated MLP": Kind("FP8GatedMLPBackward", functional.gated_mlp, mlp, 2),
    "norm": Kind(
        "RMSNormBackward",
        lambda x, w: functional.rms_norm(x, w, kind="llama"),
        lambda: (randn(K, seed=5, grad=True),),
    ),
    "adapter": Kind(
        "FP8AdaptedLinearBackward",
        with_adapter_of_one_weight,
        lambda: (randn(8, K, seed=5, grad=True), randn(N, 8, seed=6, grad=True)),
    ),
    "adapter of experts": Kind(
        "FP8AdaptedLinearBackward",
        with_adapter,
        lambda: (randn(2, 8, K, seed=5, grad=True), randn(2, N, 8, seed=6, grad=True)),
    ),
}
every_layer = pytest.mark.parametrize("layer", LAYERS)
every_layer_with_fp8 = pytest.mark.parametrize("layer", ["linear", "gated MLP"])


def weights_of(layer: str) -> tuple[Any, ...]:
    return LAYERS[layer].weights()


def second(layer: str, x: Tensor, *weights: Tensor) -> Tensor:
    """The output of a second call of a kind, which is repeated."""
    run = LAYERS[layer].run
    run(randn(*x.shape, dtype=x.dtype, seed=8, grad=x.requires_grad), *weights_of(layer))
    return run(x, *weights)


def node_of(y: Tensor, name: str) -> Any:
    """The node with this name at or below the node of ``y``."""
    node: Any = y.grad_fn
    while node.name() != name:
        node = node.next_functions[0][0]
    return node


@every_layer_with_fp8
def test_each_dtype_of_autocast_is_a_kind(layer: str) -> None:
    x, weights = randn(9, K, dtype=torch.float32, grad=True), weights_of(layer)
    for dtype in (BF16, torch.float16, BF16):
        with torch.autocast("cpu", dtype):
            y = LAYERS[layer].run(x, *weights)
        want = LAYERS[layer].run(x.detach().to(dtype), *(plain(w).to(dtype) for w in weights))
        assert y.dtype == dtype
        assert torch.equal(y, want)


@every_layer
def test_the_node_has_an_edge_for_each_operand(layer: str) -> None:
    x, weights = randn(9, K, grad=True), weights_of(layer)
    node = node_of(second(layer, x, *weights), LAYERS[layer].node)
    edges = [edge.variable for edge, _ in node.next_functions if edge is not None]
    wanted = [x] * LAYERS[layer].inputs + [*weights]
    assert all(a is b for a, b in zip(edges, wanted, strict=True))


@every_layer
def test_hooks_of_a_node_run(layer: str) -> None:
    x = randn(9, K, grad=True)
    y = second(layer, x, *weights_of(layer))
    seen: list[Any] = []
    node = node_of(y, LAYERS[layer].node)
    node.register_prehook(lambda grads: (2 * grads[0],))
    node.register_hook(lambda made, given: seen.append((made, given)))
    y.sum().backward()
    ((made, given),) = seen
    assert x.grad is not None and torch.equal(given[0], torch.full_like(y, 2))
    assert torch.equal(x.grad, sum(made[: LAYERS[layer].inputs]))


@every_layer
def test_a_retained_graph_gives_the_same_again_and_then_is_freed(layer: str) -> None:
    x, weights = randn(9, K, grad=True), weights_of(layer)
    y = second(layer, x, *weights)
    read = [x, weights[0]]
    first = torch.autograd.grad(y.sum(), read, retain_graph=True)
    again = torch.autograd.grad(y.sum(), read)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


@every_layer
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)], ids=str)
def test_some_gradients(layer: str, wanted: tuple[int, ...]) -> None:
    x, weights = randn(9, K, grad=True), weights_of(layer)
    all_of = torch.autograd.grad(second(layer, x, *weights).sum(), [x, weights[0]])
    y = second(layer, x, *weights)
    some = torch.autograd.grad(y.sum(), [(x, weights[0])[i] for i in wanted])
    assert all(torch.equal(a, all_of[i]) for a, i in zip(some, wanted, strict=True))


@every_layer_with_fp8
def test_saved_tensor_hooks_see_what_is_saved(layer: str) -> None:
    x, packed = randn(9, K, grad=True), []
    run = LAYERS[layer].run
    run(randn(9, K, grad=True), *weights_of(layer))
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    with hooks:
        y = run(x, *weights_of(layer))
    kinds = [type(t) for t in packed]
    assert kinds.count(BlockwiseFP8Weight) == (1 if layer == "linear" else 3)
    assert torch.float8_e4m3fn in [t.dtype for t in packed]
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("layer", ["linear", "gated MLP", "norm"])
def test_a_weight_that_is_written_to_before_backward_raises(layer: str) -> None:
    x, weights = randn(9, K, grad=True), weights_of(layer)
    y = second(layer, x, *weights)
    with torch.no_grad():
        weights[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_adapter_that_is_written_to_before_backward_was_converted_before() -> None:
    """Backward reads the rounded matrices of its forward."""
    x, (a, b) = randn(9, K, grad=True), weights_of("adapter of experts")
    want = torch.autograd.grad(second("adapter of experts", x, a, b).sum(), [x, a, b])
    y = second("adapter of experts", x, a, b)
    with torch.no_grad():
        a.mul_(2), b.zero_()
    found = torch.autograd.grad(y.sum(), [x, a, b])
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))


@every_layer
def test_second_derivatives_are_refused(layer: str) -> None:
    x = randn(9, K, grad=True)
    y = second(layer, x, *weights_of(layer))
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(y.sum(), [x], create_graph=True)


@every_layer
def test_compiled_autograd_is_refused(layer: str) -> None:
    y = second(layer, randn(9, K, grad=True), *weights_of(layer))
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(NotImplementedError, match="BLOCKTENSOR_PLAYER=0"),
    ):
        y.sum().backward()


@every_layer
def test_forward_mode_is_refused_as_before(layer: str) -> None:
    x, weights = randn(9, K, grad=True), weights_of(layer)
    second(layer, x, *weights)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(randn(9, K), randn(9, K))
        with pytest.raises(RuntimeError, match="jvp"):
            LAYERS[layer].run(dual, *weights)


@every_layer_with_fp8
def test_functorch_is_refused_as_before(layer: str) -> None:
    x, weights = randn(9, K, grad=True), weights_of(layer)
    second(layer, x, *weights)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda x: LAYERS[layer].run(x, *weights).sum())(randn(9, K))


@every_layer
def test_an_error_of_a_saved_tensor_reaches_the_caller(layer: str) -> None:
    x = randn(9, K, grad=True)
    run = LAYERS[layer].run
    run(randn(9, K, grad=True), *weights_of(layer))

    def unpack(_: Any) -> Tensor:
        raise KeyError("gone")

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        y = run(x, *weights_of(layer))
    with pytest.raises(KeyError, match="gone"):
        y.sum().backward()


@every_layer
@pytest.mark.parametrize("runs_backward", [True, False])
def test_nothing_outlives_a_graph(layer: str, runs_backward: bool) -> None:
    gc.collect()
    x, weights = randn(9, K, grad=True), weights_of(layer)
    y = second(layer, x, *weights)
    of_weight = getattr(weights[0], "master", weights[0])
    held = [weakref.ref(of_weight), weakref.ref(x)]
    if runs_backward:
        y.sum().backward()
    del y, weights, of_weight, x
    assert [ref() for ref in held] == [None, None]


def test_a_shared_cast_is_read_by_adapters_of_experts() -> None:
    x, weights = randn(9, K, grad=True), weights_of("adapter of experts")
    experts = BlockwiseFP8Tensor.from_values(randn(2, N, K, seed=6), (128, 128))
    offs = ends(3, 6)
    adapted = torch.baddbmm(experts, weights[1], weights[0])
    alone = [functional.grouped_linear(x, adapted, offs) for _ in range(2)]  # the second: repeated
    shared = SharedCasts()
    shared.begin()
    try:
        together = [functional.grouped_linear(x, w, offs) for w in (adapted, experts, adapted)]
    finally:
        shared.end()
    assert (shared.casts, shared.saved) == (1, 2)
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[2], alone[0])


def test_a_shared_cast_is_read_by_repeated_layers() -> None:
    x, (first, other, _) = randn(9, K, grad=True), mlp()
    alone = [second("linear", x, w) for w in (first, other)]
    shared = SharedCasts()
    shared.begin()
    try:
        together = [functional.linear(x, w) for w in (first, other)]
    finally:
        shared.end()
    assert (shared.casts, shared.saved) == (1, 1)
    assert all(node_of(y, "FP8LinearBackward") for y in together)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    both = [torch.autograd.grad(sum(y.sum() for y in ys), [x, first]) for ys in (alone, together)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_results_equal_python(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for way in ("op by op", "repeated"):
        run_linears(way, monkeypatch)
        x, weights = randn(9, K, grad=True), mlp()
        y = second("gated MLP", x, *weights)
        y.backward(randn(9, K, seed=7))
        made.append([y.detach(), x.grad, *(w.grad for w in weights)])
    assert all(torch.equal(plain(a), plain(b)) for a, b in zip(*made, strict=True))
    assert gated_mlp.repeat.table is not None
