"""What a linear decides once for its kind: what makes another kind, and how its kinds run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import blocktensor
from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional
from blocktensor.autograd import plan as plans
from blocktensor.autograd.linear import _dgrad_and_wgrad
from blocktensor.autograd.plan import Plan, plan_matmul
from blocktensor.ops.cast.ops import quantize_both
from blocktensor.ops.formats import BLOCKS_1X128, Quantized
from tests.support.linear_ways import WAYS, run_linears
from tests.support.models import assert_matches, composed, linear, plain, randn, unaligned

N, K = 256, 384


def weight(n: int = N, *, dtype: torch.dtype = torch.bfloat16, **recipe: str) -> BlockwiseFP8Weight:
    return BlockwiseFP8Weight(randn(n, K, dtype=dtype), Recipe(**recipe)).requires_grad_()


def plan(x: Tensor, w: Tensor, bias: Tensor | None = None, recipe: Recipe | None = None) -> Plan:
    return plan_matmul(x, w, bias, recipe)


def backward_of(known: Plan, grad: Tensor, x: Quantized) -> Any:
    """What runs the backward of a known kind for this gradient and this saved input."""
    return known.record_backward(_dgrad_and_wgrad, grad, x)


def assert_apart(decide: Callable[..., Any], calls: list[Any]) -> None:
    """Each call has a decision of its own, and the same the next time."""
    made = [decide(*call) for call in calls]
    assert len(set(map(id, made))) == len(made)
    assert [decide(*call) for call in calls] == made


X = randn(6, K)
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


def test_what_tells_inputs_apart() -> None:
    w = weight()
    assert_apart(plan, [(laid_out(X), w) for laid_out in LAYOUTS.values()])


def test_what_tells_weights_and_biases_apart() -> None:
    frozen = weight().requires_grad_(False)
    bias = randn(N)
    calls = [
        (X, weight()),
        (X, frozen),
        (X, weight(N + 128)),
        (X, weight(scale="power_of_two")),
        (X.float(), weight(dtype=torch.float32)),
        (X, weight(), bias),
        (X, weight(), bias.clone().requires_grad_()),
        (X, weight(), unaligned(bias)),
        (X, weight(), bias.repeat(2)[::2].copy_(bias)),
        (X, weight(), None, Recipe()),
    ]
    assert_apart(plan, calls)


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


def test_what_tells_gradients_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    run_linears("sequence", monkeypatch)
    known, grad, (_, x_col) = plan(X, weight()), randn(6, N), quantize_both(X, BLOCKS_1X128)
    grads = [grad, unaligned(grad), grad.t().contiguous().t(), grad[:1].expand(6, N), grad.float()]
    backwards = [backward_of(known, g, x_col) for g in grads]
    assert [backward_of(known, g, x_col) for g in grads] == backwards
    other = plan(X.clone().requires_grad_(), weight())
    backwards.append(backward_of(other, grad, x_col))
    monkeypatch.setenv("BLOCKTENSOR_GEMM", "reference")
    backwards.append(backward_of(known, grad, x_col))
    assert len(set(map(id, backwards))) == len(backwards)


def test_what_tells_saved_inputs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    run_linears("sequence", monkeypatch)
    known, grad, (_, x_col) = plan(X, weight()), randn(6, N), quantize_both(X, BLOCKS_1X128)
    data, scale, _ = x_col
    moved = torch.empty(data.numel() + 1, dtype=data.dtype)[1:].view(data.shape)
    pairs = [(data, scale), (moved, scale), (data, unaligned(scale)), (data, scale[::2])]
    saved = [Quantized(*pair, BLOCKS_1X128) for pair in pairs]
    assert_apart(backward_of, [(known, grad, x) for x in saved])


def test_other_operands_are_planned_for_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiler, a mode or a plain weight needs must not serve a call that records."""
    run_linears("sequence", monkeypatch)
    frozen = BlockwiseFP8Tensor.from_values(randn(N, K), (128, 128))
    shared = BlockwiseFP8Tensor.from_values(X)
    calls = [(x, randn(N, K)) for x in (X, shared)]
    calls += [(X.to("meta"), w.to("meta")) for w in (weight(), frozen)]
    plans = [plan(*call) for call in calls]
    with FlopCounterMode(display=False):
        plans += [plan(shared, frozen), plan(X, weight())]
    for known in plans:
        assert not known.records_forward
        assert not known.records_backward
    assert not any(plan(*call) in plans for call in calls)
    with FlopCounterMode(display=False):
        assert plan(X, weight()) not in plans


def test_which_linears_record_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing, shared = X[:0], BlockwiseFP8Tensor.from_values(X)
    for way in WAYS:
        with monkeypatch.context() as patched:
            run_linears(way, patched)
            known = plan(X, weight())
            recorded = known.records_forward, known.records_backward
            assert recorded == (way == "sequence", way == "sequence")
            # of an input in FP8 there is nothing to cast, and without rows nothing to launch
            assert not plan(shared, weight()).records_forward
            empty = plan(nothing, weight())
            assert not (empty.records_forward or empty.records_backward)
    assert not plan(X, weight()).records_forward  # on a CPU nothing can be recorded


def test_which_recorded_forwards_cast_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    run_linears("sequence", monkeypatch)
    x, square = X.clone().requires_grad_(), weight(K)
    assert plan(x, square).casts_weight
    assert not plan(x, square.t()).casts_weight
    assert not plan(x.detach(), square).casts_weight  # no dgrad reads the weight
    assert not plan(x, weight(K, cache_weight="step")).casts_weight
    monkeypatch.setattr("blocktensor.autograd.plan.ONE_READ_BYTES", 1)
    assert not plan(x, weight(K + 1)).casts_weight


def test_masters_of_other_layouts_are_planned_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    run_linears("sequence", monkeypatch)
    values, wide = randn(K, K), randn(K, 2 * K)
    masters = (values, values.t(), wide[:, ::2], unaligned(values))
    assert_apart(plan, [(X, BlockwiseFP8Weight(m).requires_grad_()) for m in masters])


def test_a_recorded_forward_holds_its_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    run_linears("sequence", monkeypatch)
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
    run_linears("sequence", monkeypatch)
    monkeypatch.setattr(plans, "LARGE_BYTES", 2 * 4097)
    made = plan(randn(*x), BlockwiseFP8Weight(randn(*w)).requires_grad_())
    assert made.records_backward == records


def test_what_tells_fp8_operands_apart() -> None:
    x, values = BlockwiseFP8Tensor.from_values(X), randn(N, K)
    powers = Recipe(scale="power_of_two")
    frozen = BlockwiseFP8Tensor.from_values(values, (128, 128))
    moved = BlockwiseFP8Tensor(
        frozen.rowwise()._replace(
            data=unaligned(frozen.rowwise_data.view(torch.int8)).view(torch.float8_e4m3fn)
        ),
        None, shape=frozen.shape, dtype=frozen.dtype,
    )  # fmt: skip
    both = frozen.relabel()
    both.columnwise_data, both.columnwise_scale, _ = frozen.columnwise()
    calls = [(x, weight()), (x.detach().requires_grad_(), weight())]
    calls += [(X, frozen), (X, moved), (X, both), (x, frozen), (X, weight())]
    calls += [
        (BlockwiseFP8Tensor.from_values(X, recipe=powers), weight(scale="power_of_two")),
        (X, BlockwiseFP8Tensor.from_values(values, (128, 128), powers)),
    ]
    assert_apart(plan, calls)
    assert plan(BlockwiseFP8Tensor.from_values(-X), weight()) is plan(*calls[0])


def test_inputs_of_one_kind_may_hold_other_forms() -> None:
    """Nothing is recorded of an input in FP8: each gives the forms that it holds."""
    both, row_only = (BlockwiseFP8Tensor.from_values(X, columnwise=c) for c in (True, False))
    module, frozen = linear(N, K), BlockwiseFP8Tensor.from_values(randn(N, K), (128, 128))
    for _ in range(2):
        assert torch.equal(functional.linear(both, frozen), functional.linear(row_only, frozen))
        module(both)
        with pytest.raises(ValueError, match="without its columnwise form"):
            module(row_only)


def test_kinds_in_turn_compute_as_each_alone(device: torch.device) -> None:
    """On a GPU, a run for one layout would read another's bytes in the wrong place."""
    module, x = linear(N, K, device=device), randn(6, K, device=device)
    values, grad = plain(module.weight), randn(6, N, seed=3, device=device)
    grads = [grad, unaligned(grad), grad.t().contiguous().t()]
    for laid_out in 3 * [*LAYOUTS.values()]:
        for g in grads:
            leaf = laid_out(x).detach().requires_grad_()
            flat = leaf.detach().reshape(-1, K).contiguous()
            g = g if len(flat) == 6 else torch.cat([g, g])
            module.weight.grad = None
            y = module(leaf)
            y.backward(g.reshape(y.shape))
            got = y.detach().reshape(-1, N), leaf.grad.reshape(-1, K), module.weight.grad
            for a, b in zip(got, composed(flat, values, g.contiguous()), strict=True):
                assert_matches(a, b)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(K,), (6, K), (2, 3, K)], ids=str)
def test_small_and_large_linears_compute_alike(
    shape: tuple[int, ...], bias: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones run as one sequence in each direction."""
    results = []
    for way in WAYS:
        with monkeypatch.context() as patched:
            run_linears(way, patched)
            module = linear(N, K, bias=bias, device=device)
            for _ in range(3):
                x = randn(*shape, device=device, grad=True)
                module.zero_grad()
                y = module(x)
                y.backward(randn(*y.shape, seed=4, device=device))
            parameters = [p.grad for p in module.parameters()]
            results.append([y.detach(), x.grad, *parameters])
            known = plan_matmul(x, module.weight, module.bias, None)
            assert known.records_backward == (way == "sequence")
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("pack", [lambda t: t.clone(), unaligned], ids=["clone", "unaligned"])
def test_saved_inputs_may_come_back_laid_out_anew(
    pack: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    module, grads = linear(N, K, device=device), []
    for hook in (lambda t: t, pack, lambda t: t):

        def of_x(t: Tensor, hook: Callable[[Tensor], Tensor] = hook) -> Tensor:
            return t if isinstance(t, BlockwiseFP8Weight) else hook(t)

        with torch.autograd.graph.saved_tensors_hooks(of_x, lambda t: t):
            y = module(X.to(device))
        grads += torch.autograd.grad(y, module.weight, torch.ones_like(y))
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_who_counts_flops_sees_the_ops_of_a_known_kind() -> None:
    module, product = linear(N, K), 2 * 6 * N * K
    in_vectors = 2 * 16 * N * K  # wgrad contracts whole vectors of tokens
    for _ in range(2):  # the second time, the kind is known
        module(X.clone().requires_grad_()).sum().backward()
        x = X.clone().requires_grad_()
        with FlopCounterMode(display=False) as forward:
            y = module(x)
        assert forward.get_total_flops() == product
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        assert backward.get_total_flops() == product + in_vectors
        y = module(x)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        assert backward.get_total_flops() == product + in_vectors


def test_what_raises_raises_again_and_spoils_nothing() -> None:
    module = linear(N, K)
    for _ in range(2):
        for wrong in (X.float(), X[:, :128], X.to("meta")):
            with pytest.raises((TypeError, ValueError)):
                module(wrong)
        with pytest.raises(ValueError, match="mixed recipes"):
            functional.linear(X, module.weight, recipe=Recipe(scale="power_of_two"))
        assert torch.isfinite(module(X)).all()


def test_a_cast_without_its_source_is_planned_for_itself() -> None:
    recipe = Recipe(wgrad_input="high_precision")
    w = weight(wgrad_input="high_precision")
    functional.linear(blocktensor.quantize(X, recipe), w)
    alone = blocktensor.quantize(X, recipe)
    alone.source = None
    with pytest.raises(ValueError, match="mixed recipes"):
        functional.linear(alone, w)
