"""What a linear decides once for its kind: what makes another kind, and the ops that it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional, quantize
from blocktensor.autograd import plan as plans
from tests.support.linear_ways import HIGH, ROWS, WAYS, grads_of, run_linears
from tests.support.models import Trace, assert_matches, composed, linear, plain, randn, unaligned
from tests.support.steps import assert_trace, ours

N, K = 256, 384


def weight(n: int = N, *, dtype: torch.dtype = torch.bfloat16, **recipe: Any) -> BlockwiseFP8Weight:
    return BlockwiseFP8Weight(randn(n, K, dtype=dtype), Recipe(**recipe)).requires_grad_()


def plan(
    x: Tensor, w: Tensor, bias: Tensor | None = None, recipe: Recipe | None = None
) -> plans.Plan:
    return plans.plan_matmul(x, w, bias, recipe)


@pytest.fixture
def sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run linears as sequences."""
    run_linears("sequence", monkeypatch)


records = pytest.mark.usefixtures("sequences")


def assert_apart(decide: Callable[..., Any], calls: list[Any]) -> list[Any]:
    """Each call has a decision of its own, and the same the next time."""
    made = [decide(*call) for call in calls]
    assert len(set(map(id, made))) == len(made)
    assert [decide(*call) for call in calls] == made
    return made


X = randn(6, K)
# Strides, addresses and rows within a step make no other plan: what runs by it has its own keys.
SAME_PLAN = ("unaligned", "transposed", "wider rows", "more rows", "other leading dimensions")
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x.clone(),
    "with a gradient": lambda x: x.clone().requires_grad_(),
    "unaligned": unaligned,
    "transposed": lambda x: x.t().contiguous().t(),
    "wider rows": lambda x: torch.cat([x, x], 1)[:, :K],
    "leading dimensions": lambda x: x.view(2, 3, K).clone(),
    "other leading dimensions": lambda x: x.view(3, 2, K).clone(),
    "more rows": lambda x: torch.cat([x, x]),
}


def test_what_tells_operands_apart() -> None:
    w, bias, shared, values = weight(), randn(N), quantize(X), randn(K, K)
    powers = Recipe(scale="power_of_two")
    recipes = Recipe(), Recipe(batch_invariant=True), ROWS
    others = powers, *recipes[1:], HIGH, Recipe(cache_weight=False)
    frozen = [linear(N, K, recipe=r, frozen=True).weight for r in recipes]
    calls = [
        *[(laid_out(X), w) for name, laid_out in LAYOUTS.items() if name not in SAME_PLAN],
        (X.repeat(11, 1), w),  # more rows than a step
        (X, BlockwiseFP8Weight(values).requires_grad_()),
        *[(X, BlockwiseFP8Weight(randn(N, K), each).requires_grad_()) for each in others],
        *[(X, w, None, each) for each in recipes],
        (X, weight().requires_grad_(False)),
        (X.float(), weight(dtype=torch.float32)),
        (X, w, bias),
        (X, w, bias.clone().requires_grad_()),
        *[(X, each) for each in frozen],
        (X, BlockwiseFP8Tensor.from_values(randn(N, K), (128, 128), powers)),
        (shared, weight()),
        (shared.detach().requires_grad_(), weight()),
        (shared, frozen[0]),
        (quantize(X, powers), weight(scale="power_of_two")),
        (quantize(X, ROWS), frozen[0]),
    ]
    made = assert_apart(plan, calls)
    assert plan(quantize(-X), weight()) is made[-5]
    same = [plan(LAYOUTS[name](X), w) for name in SAME_PLAN]
    assert all(each is made[0] for each in same[:-1])
    assert same[-1] is plan(LAYOUTS["leading dimensions"](X), w)
    assert [plan(X, each).batch_invariant for each in frozen] == [False, True, False]


def test_what_tells_surroundings_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight()
    plans = [plan(X, w)]
    with torch.no_grad():
        plans.append(plan(X, w))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            plans.append(plan(X, w))
    with torch.autocast("cpu", enabled=False):
        assert plan(X, w) is plans[0]
    monkeypatch.setenv("BLOCKTENSOR_GEMM", "reference")
    plans.append(plan(X, w))
    assert len(set(map(id, plans))) == len(plans)
    monkeypatch.delenv("BLOCKTENSOR_GEMM")
    assert plan(X, w) is plans[0]


@records
def test_other_operands_are_planned_for_one_call() -> None:
    """What a compiler, a mode or a plain weight needs must not serve a call that records."""
    frozen = BlockwiseFP8Tensor.from_values(randn(N, K), (128, 128))
    shared = quantize(X)
    calls = [(x, randn(N, K)) for x in (X, shared)]
    calls += [(X.to("meta"), w.to("meta")) for w in (weight(), frozen)]
    fake = FakeTensorMode().from_tensor(randn(N, K))
    calls += [
        (X, BlockwiseFP8Weight(fake)),
        (X, randn(N, K).as_subclass(type("Other", (Tensor,), {}))),
    ]
    plans = [plan(*call) for call in calls]
    assert [each.tracing for each in plans] == [False] * 4 + [True] * 2
    with FlopCounterMode(display=False):
        plans += [plan(shared, frozen), plan(X, weight())]
    for known in plans:
        assert not known.records_forward
        assert not known.records_backward
    assert not any(plan(*call) in plans for call in calls)
    with FlopCounterMode(display=False):
        assert plan(X, weight()) not in plans


@pytest.mark.not_repeated
def test_which_linears_record_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = quantize(X)
    for way in WAYS:
        with monkeypatch.context() as patched:
            run_linears(way, patched)
            known, empty = plan(X, weight()), plan(X[:0], weight())
            assert known.records_forward == known.records_backward == (way != "op by op")
            # of an input in FP8 there is nothing to cast, and without rows nothing to launch
            assert not plan(shared, weight()).records_forward
            assert not (empty.records_forward or empty.records_backward)
    assert not plan(X, weight()).records_forward  # on a CPU nothing can be recorded


@records
def test_which_recorded_forwards_cast_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    x, square = X.clone().requires_grad_(), weight(K)
    assert plan(x, square).casts_weight
    assert not plan(x, square.t()).casts_weight
    assert not plan(x.detach(), square).casts_weight  # no dgrad reads the weight
    assert not plan(x, weight(K, cache_weight=False)).casts_weight
    monkeypatch.setattr("blocktensor.autograd.plan.ONE_READ_BYTES", 1)
    assert not plan(x, weight(K + 1)).casts_weight


@records
def test_a_recorded_forward_holds_its_cast() -> None:
    w, x = weight(K), X.clone().requires_grad_()
    y = functional.linear(x, w)
    assert w.cache.casts == 1
    assert torch.equal(w.cache.held().columnwise.data, w.columnwise().data)  # type: ignore[union-attr]
    with torch.no_grad():
        w.master.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        y.sum().backward()
    y = functional.linear(x, w)
    y.sum().backward()
    assert w.cache.held().nbytes() == 0


@records
@pytest.mark.parametrize(
    ("x", "w", "records"),
    [
        ((1, 1), (1, 1), True),
        ((2, 3, 64), (64, 64), True),
        ((0, 64), (64, 64), False),
        ((2, 0, 64), (64, 64), False),
        ((5, 64), (0, 64), False),
        ((5, 0), (64, 0), False),
        ((64, 8), (64, 8), True),  # of an output of 4096 entries
        ((65, 8), (64, 8), False),
        ((1, 64), (64, 64), True),  # and a weight of as many
        ((1, 64), (65, 64), False),
    ],
)
def test_small_linears_run_backward_as_one_sequence(
    x: tuple[int, ...], w: tuple[int, int], records: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "LARGE_BYTES", 2 * 4097)
    made = plan(randn(*x), BlockwiseFP8Weight(randn(*w)).requires_grad_())
    assert made.records_backward == records


def test_inputs_of_one_kind_may_hold_other_forms() -> None:
    """Nothing is recorded of an input in FP8: each gives the forms that it holds."""
    both, row_only = (BlockwiseFP8Tensor.from_values(X, columnwise=c) for c in (True, False))
    module = linear(N, K, recipe=ROWS)
    frozen = BlockwiseFP8Tensor.from_values(randn(N, K), (128, 128))
    for _ in range(2):
        assert torch.equal(functional.linear(both, frozen), functional.linear(row_only, frozen))
        module(both)
        with pytest.raises(ValueError, match="has no columnwise blocks"):
            module(row_only)


def test_kinds_in_turn_compute_as_each_alone(device: torch.device) -> None:
    module, x = linear(N, K, bias=True, device=device), randn(6, K, device=device)
    values, grad = plain(module.weight), randn(6, N, seed=3, device=device)
    grads = [grad, unaligned(grad), grad.t().contiguous().t()]
    for laid_out in 3 * [*LAYOUTS.values()]:
        for g in grads:
            leaf = laid_out(x).detach()
            flat = leaf.reshape(-1, K).contiguous()
            g = g if len(flat) == 6 else torch.cat([g, g])
            y, dx, dw, _ = grads_of(module, leaf, g.reshape(*leaf.shape[:-1], N))
            wanted = composed(flat, values, g.contiguous(), bias=plain(module.bias))
            for a, b in zip((y.reshape(-1, N), dx.reshape(-1, K), dw), wanted, strict=True):
                assert_matches(a, b)


def test_who_counts_flops_sees_the_ops_of_a_known_kind() -> None:
    module, product = linear(N, K), 2 * 6 * N * K
    in_steps = 2 * 64 * N * K  # wgrad contracts a multiple of 64 tokens
    x = X.clone().requires_grad_()
    for _ in range(2):  # the second time, the kind is known
        module(x).sum().backward()
        with FlopCounterMode(display=False) as forward:
            outputs = [module(x), module(x)]
        assert forward.get_total_flops() == 2 * product
        for y in (*outputs, module(x)):
            with FlopCounterMode(display=False) as backward:
                y.sum().backward()
            assert backward.get_total_flops() == product + in_steps


def test_a_cast_without_its_source_is_planned_for_itself() -> None:
    w = weight(wgrad_input="high_precision")
    functional.linear(quantize(X, w.recipe), w)
    alone = quantize(X, w.recipe)
    alone.source = None
    with pytest.raises(ValueError, match="lacks the tensor from which"):
        functional.linear(alone, w)


OF_WEIGHT, PRODUCT = "quantize_with_transpose 128x128", "gemm 1x128 128x128"
# of each ``wgrad_input``: the recipe, the ops of forward and of backward
OPS: dict[str, tuple[Recipe, list[str], list[str]]] = {
    "1x128": (
        ROWS,
        [OF_WEIGHT, "quantize_both 1x128", PRODUCT],
        ["quantize_both 1x128", PRODUCT, "gemm 1x128 1x128"],
    ),
    "128x128": (
        Recipe(),
        [OF_WEIGHT, "quantize_both 1x128 128x128", PRODUCT],
        ["quantize_both 1x128", PRODUCT, "gemm 1x128 128x128"],
    ),
    "high_precision": (
        HIGH,
        [OF_WEIGHT, "quantize_rowwise 1x128", PRODUCT],
        ["quantize_rowwise 1x128", PRODUCT],  # and aten.mm
    ),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 384), (2, 5, 384)])
@pytest.mark.parametrize("wgrad_input", OPS)
def test_a_forward_and_a_backward(wgrad_input: str, shape: tuple[int, ...], bias: bool) -> None:
    recipe, forward, backward = OPS[wgrad_input]
    module = linear(256, 384, recipe=recipe, bias=bias)
    assert_trace(module, randn(*shape), forward=forward, backward=backward)
    others = {"aten.mm": int(recipe is HIGH), "aten.sum": int(bias)}
    assert_trace(module, randn(*shape), backward=others)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_all_is_cast_rowwise_only(mode: Callable[[], Any]) -> None:
    for frozen in (False, True):
        module, of_weight = linear(256, 384, frozen=frozen), "quantize_rowwise 128x128"
        wanted = [*([] if frozen else [of_weight]), "quantize_rowwise 1x128", PRODUCT]
        x = randn(5, 384, grad=True)
        with mode(), Trace() as trace:
            module(x)
        assert ours(trace) == wanted


@pytest.mark.parametrize(
    ("x_grad", "w_grad", "backward"),
    [
        (True, True, ["quantize_both 1x128", PRODUCT, "gemm 1x128 128x128"]),
        (True, False, ["quantize_rowwise 1x128", PRODUCT]),
        (False, True, ["quantize_columnwise 1x128", "gemm 1x128 128x128"]),
        (False, False, []),
    ],
)
def test_backward_runs_only_what_is_asked_for(x_grad: bool, w_grad: bool, backward: Any) -> None:
    module, x = linear(256, 384, bias=True), randn(5, 384, grad=x_grad)
    module.weight.requires_grad_(w_grad)
    of_weight = OF_WEIGHT if x_grad else "quantize_rowwise 128x128"
    of_x = "quantize_both 1x128 128x128" if w_grad else "quantize_rowwise 1x128"
    with Trace() as trace:
        y = module(x)
    assert ours(trace) == [of_weight, of_x, PRODUCT]
    inputs = [t for t in (x, *module.parameters()) if t.requires_grad]
    with Trace() as trace:
        torch.autograd.grad(y, inputs, randn(5, 256, seed=3))
    assert ours(trace) == backward
    assert trace.count("mm") == trace.count("blocktensor.gemm")
    assert trace.count("transpose") == 0
