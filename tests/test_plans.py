"""What a linear decides once for its kind: what makes another kind, and who must see its ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe, functional, plans
from blocktensor.ops import library
from blocktensor.ops.pinned import Pinned
from blocktensor.plans import Plan, plan_linear
from tests.models import assert_matches, composed, linear, plain, randn

N, K = 256, 384


def weight(n: int = N, *, dtype: torch.dtype = torch.bfloat16, **recipe: str) -> BlockwiseFP8Weight:
    return BlockwiseFP8Weight(randn(n, K, dtype=dtype), Recipe(**recipe)).requires_grad_()


def plan(x: Tensor, w: Tensor, bias: Tensor | None = None, recipe: Recipe | None = None) -> Plan:
    return plan_linear(x, w, bias, recipe)


def unaligned(x: Tensor) -> Tensor:
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


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
    plans = [plan(laid_out(X), w) for laid_out in LAYOUTS.values()]
    assert len(set(map(id, plans))) == len(plans)
    assert [plan(laid_out(X), weight()) for laid_out in LAYOUTS.values()] == plans


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
    plans = [plan(*call) for call in calls]
    assert len(set(map(id, plans))) == len(plans)
    assert [plan(*call) for call in calls] == plans


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
    known, grad = plan(X, weight()), randn(6, N)
    grads = [grad, unaligned(grad), grad.t().contiguous().t(), grad[:1].expand(6, N), grad.float()]
    backwards = [known.backward(g) for g in grads]
    assert [known.backward(g) for g in grads] == backwards
    monkeypatch.setenv("BLOCKTENSOR_GEMM", "reference")
    backwards.append(known.backward(grad))
    assert len(set(map(id, backwards))) == len(backwards)


def test_what_tells_saved_inputs_apart() -> None:
    backward = plan(X, weight()).backward(randn(6, N))
    _, _, data, scale = library.quantize_both(X, False)
    moved = torch.empty(data.numel() + 1, dtype=data.dtype)[1:].view(data.shape)
    saved = [(data, scale), (moved, scale), (data, unaligned(scale)), (data, scale[::2])]
    kinds = [backward.saved(*pair) for pair in saved]
    assert len(set(map(id, kinds))) == len(kinds)
    assert [backward.saved(*pair) for pair in saved] == kinds


def test_other_operands_are_planned_for_one_call() -> None:
    for x in (X, BlockwiseFP8Tensor.quantize(X)):
        assert not plan(x, randn(N, K)).pinned
    assert not plan(X.to("meta"), weight().to("meta")).pinned
    frozen = BlockwiseFP8Tensor.quantize(randn(N, K), (128, 128))
    assert not plan(X.to("meta"), frozen.to("meta")).pinned
    with FlopCounterMode(display=False):
        assert not plan(BlockwiseFP8Tensor.quantize(X), frozen).pinned


def test_what_tells_fp8_operands_apart() -> None:
    x, values = BlockwiseFP8Tensor.quantize(X), randn(N, K)
    powers = Recipe(scale="power_of_two")
    frozen = BlockwiseFP8Tensor.quantize(values, (128, 128))
    moved = BlockwiseFP8Tensor(
        (unaligned(frozen.rowwise_data.view(torch.int8)).view(torch.float8_e4m3fn),
         frozen.rowwise_scale),
        None, shape=frozen.shape, dtype=frozen.dtype, block_shape=(128, 128),
    )  # fmt: skip
    both = frozen.relabel()
    both.columnwise_data, both.columnwise_scale = frozen.columnwise()
    row_only = BlockwiseFP8Tensor.quantize(X, columnwise=False)
    calls = [(x, weight()), (row_only, weight()), (x.detach().requires_grad_(), weight())]
    calls += [(X, frozen), (X, moved), (X, both), (x, frozen), (X, weight())]
    calls += [
        (BlockwiseFP8Tensor.quantize(X, recipe=powers), weight(scale="power_of_two")),
        (X, BlockwiseFP8Tensor.quantize(values, (128, 128), powers)),
    ]
    plans = [plan(*call) for call in calls]
    assert all(known.pinned for known in plans)
    assert len(set(map(id, plans))) == len(plans)
    assert [plan(*call) for call in calls] == plans
    assert plan(BlockwiseFP8Tensor.quantize(-X), weight()) is plans[0]


def test_a_frozen_weight_may_come_back_laid_out_anew(device: torch.device) -> None:
    """On a GPU, a run for one layout would read another's bytes in the wrong place."""
    module = linear(N, K, device=device, frozen=True)
    grads = []
    for hook in (lambda t: t, unaligned, lambda t: t):
        leaf = X.to(device).clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, hook=hook: hook(t.view(torch.int8)).view(t.dtype)
            if t.element_size() == 1 else hook(t),
            lambda t: t,
        ):  # fmt: skip
            y = module(leaf)
        grads += torch.autograd.grad(y, leaf, torch.ones_like(y))
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


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


def test_gradients_are_those_that_are_asked_for_now() -> None:
    module = linear(N, K)
    for x_needs, w_needs in [(True, True), (False, True), (True, False), (False, False)] * 2:
        x = X.clone().requires_grad_(x_needs)
        module.weight.requires_grad_(w_needs)
        module.weight.grad = None
        y = module(x)
        assert y.requires_grad == (x_needs or w_needs)
        if y.requires_grad:
            y.sum().backward()
        assert (x.grad is not None, module.weight.grad is not None) == (x_needs, w_needs)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(K,), (6, K), (2, 3, K)], ids=str)
def test_small_and_large_linears_compute_alike(
    shape: tuple[int, ...], bias: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones run as one op in each direction."""
    results = []
    for limit in (plans.EARLY_BYTES, 0):
        monkeypatch.setattr(plans, "EARLY_BYTES", limit)
        module = linear(N, K, bias=bias, device=device)
        monkeypatch.setattr(plans, "_PLANS", {})
        for _ in range(3):
            x = randn(*shape, device=device, grad=True)
            module.zero_grad()
            y = module(x)
            y.backward(randn(*y.shape, seed=4, device=device))
        parameters = [p.grad for p in module.parameters()]
        results.append([y.detach(), x.grad, *parameters])
        known = plan_linear(x, module.weight, module.bias, None)
        assert (known.fused is not None) == (limit > 0)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


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
    for _ in range(2):  # the second time, the kind is known
        module(X.clone().requires_grad_()).sum().backward()
        x = X.clone().requires_grad_()
        with FlopCounterMode(display=False) as forward:
            y = module(x)
        assert forward.get_total_flops() == product
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        assert backward.get_total_flops() == 2 * product
        y = module(x)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        assert backward.get_total_flops() == 2 * product


def test_what_raises_raises_again_and_spoils_nothing() -> None:
    module = linear(N, K)
    for _ in range(2):
        for wrong in (X.float(), X[:, :128], X.to("meta")):
            with pytest.raises((TypeError, ValueError)):
                module(wrong)
        with pytest.raises(ValueError, match="mixed recipes"):
            functional.linear(X, module.weight, recipe=Recipe(scale="power_of_two"))
        assert torch.isfinite(module(X)).all()


def test_a_pinned_op_looks_for_its_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, x = Pinned(), randn(6, K)
    wanted = library.quantize_rowwise(x, False)
    first = ops.quantize_rowwise(x, False)
    monkeypatch.setattr(library._rowwise, "_kind", None)
    for got in (first, ops.quantize_rowwise(x, False)):
        assert torch.equal(got[0].view(torch.uint8), wanted[0].view(torch.uint8))
    with pytest.raises(AttributeError, match="nothing"):
        _ = ops.nothing


def test_a_weights_gradient_is_a_tensors() -> None:
    w = weight()
    assert w.grad is None
    w.grad = grad = torch.ones(N, K, dtype=w.dtype)
    assert w.grad is grad
    with pytest.raises(RuntimeError, match="size"):
        w.grad = torch.ones(3, dtype=w.dtype)
    del w.grad
    assert w.grad is None
