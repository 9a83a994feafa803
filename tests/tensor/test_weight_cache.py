"""The FP8 form of a trainable weight: cast in every forward, held for the backwards that wait."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, functional
from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128
from blocktensor.tensor import weight_cache
from tests.support.models import Trace, assert_same_bytes, complaint, linear, plain, randn

N, K = 128, 192
X = randn(5, K, dtype=torch.float32)


FP8_BYTES = N * K + 4 * 2  # two blocks


def test_every_forward_casts_and_every_backward_reads_that_cast() -> None:
    module = linear(N, K, dtype=torch.float32)
    cache = module.weight.cache
    for i in range(1, 4):
        module(X.clone().requires_grad_()).sum().backward()
        assert (cache.casts, cache.nbytes()) == (i, 0)


def test_forwards_that_wait_share_one_form_until_the_last_backward() -> None:
    module = linear(N, K, dtype=torch.float32)
    cache = module.weight.cache
    waiting = [module(X.clone().requires_grad_()) for _ in range(3)]
    for y in waiting:
        assert cache.nbytes() == FP8_BYTES
        y.sum().backward()
    assert (cache.casts, cache.nbytes()) == (3, 0)


@pytest.mark.parametrize("columnwise", ["on_demand", "keep"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_graph_holds_the_form_that_its_dgrad_reads(is_transposed: bool, columnwise: Any) -> None:
    """Of a weight's transpose, dgrad reads the rowwise form."""
    weight = linear(N, K, recipe=Recipe(columnwise=columnwise)).weight
    leaf = randn(5, N if is_transposed else K, grad=True)
    with Trace() as trace:
        y = nn.functional.linear(leaf, weight.t() if is_transposed else weight)
    assert trace.count("quantize_with_transpose") == 1
    held = weight.cache.held()
    wanted = reference.quantize_with_transpose(plain(weight), BLOCKS_128X128)
    for form, want in zip(held, wanted, strict=True):
        if form is not None:
            assert_same_bytes(form.data, want.data)
    assert [form is None for form in held] == (
        [False, False] if columnwise == "keep" else [not is_transposed, is_transposed]
    )
    with Trace() as trace:
        y.sum().backward()
    assert trace.count("transpose") == 0


@pytest.mark.parametrize("most", [N * K - 1, N * K])
def test_forms_of_large_weights_are_made_one_by_one(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a layer does not hold both during its forward."""
    monkeypatch.setattr(weight_cache, "ONE_READ_BYTES", most)
    module, leaf = linear(N, K), randn(5, K, grad=True)
    with Trace() as trace:
        y = module(leaf)
    held, both = module.weight.cache.held(), most == N * K
    assert [form is None for form in held] == [both, not both]
    assert trace.count("quantize_with_transpose") == both
    with Trace() as trace:
        y.sum().backward()
    assert trace.count("blocktensor.transpose") == (not both)
    assert (module.weight.cache.casts, module.weight.cache.nbytes()) == (1, 0)


def test_graphs_of_a_weight_and_of_its_transpose_share_the_form_of_the_latest() -> None:
    weight, x, z = linear(N, K).weight, randn(5, K, grad=True), randn(7, N, seed=1, grad=True)
    wanted = [
        *torch.autograd.grad(nn.functional.linear(x, weight).sum(), x),
        *torch.autograd.grad(nn.functional.linear(z, weight.t()).sum(), z),
    ]
    for first in (0, 1):
        runs = [
            lambda: nn.functional.linear(x, weight),
            lambda: nn.functional.linear(z, weight.t()),
        ]
        outputs = {i: runs[i]() for i in (first, 1 - first)}
        for i in (0, 1):
            (got,) = torch.autograd.grad(outputs[i].sum(), (x, z)[i])
            assert torch.equal(got, wanted[i])
        assert weight.cache.nbytes() == 0


@pytest.mark.parametrize(("n", "ops"), [
    (128, ["quantize_columnwise 128x128"]),
    (130, ["quantize_rowwise 128x128", "transpose 128x128"]),
])  # fmt: skip
def test_backward_casts_the_form_that_it_reads(n: int, ops: list[str]) -> None:
    module = linear(n, K, recipe=Recipe(cache_weight=False))
    y = module(randn(5, K, grad=True)).sum()
    assert module.weight.cache.nbytes() == 0
    with Trace() as trace:
        y.backward()
    assert [op for op in trace.ops if "128x128" in op and "gemm" not in op] == [
        f"blocktensor.{op}" for op in ops
    ]
    assert module.weight.cache.casts == 2


def test_a_graph_that_is_dropped_frees_the_form() -> None:
    module = linear(N, K, dtype=torch.float32)
    y = module(X.clone().requires_grad_())
    assert module.weight.cache.nbytes() == FP8_BYTES
    del y
    assert module.weight.cache.nbytes() == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.detach(), lambda w: w.t().t()])
def test_without_gradients_nothing_is_held(
    mode: Callable[[], Any], view: Callable[[Tensor], Tensor]
) -> None:
    module = linear(N, K, dtype=torch.float32)
    with mode():
        nn.functional.linear(X, view(module.weight))
    assert (module.weight.cache.casts, module.weight.cache.nbytes()) == (1, 0)


def test_only_a_dgrad_that_may_come_holds_the_form() -> None:
    module = linear(N, K, dtype=torch.float32)
    y = module(X)
    assert y.requires_grad
    assert module.weight.cache.nbytes() == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_casts_again_and_releases(reentrant: bool) -> None:
    module = linear(N, K, dtype=torch.float32)
    cache = module.weight.cache
    y = checkpoint(module, X.clone().requires_grad_(), use_reentrant=reentrant)
    assert (cache.casts, cache.nbytes()) == (1, 0 if reentrant else FP8_BYTES)
    y.sum().backward()
    assert (cache.casts, cache.nbytes()) == (2, 0)


def test_a_second_backward_of_a_retained_graph_casts_again() -> None:
    module, leaf = linear(N, K, dtype=torch.float32), X.clone().requires_grad_()
    y = module(leaf).sum()
    first = torch.autograd.grad(y, leaf, retain_graph=True)
    assert module.weight.cache.nbytes() == 0
    assert torch.equal(*first, *torch.autograd.grad(y, leaf))
    assert module.weight.cache.casts == 2


@pytest.mark.parametrize("write", [lambda m: m.state_dict()["weight"].add_(1), nn.Module.half])
def test_a_second_backward_compares_and_reads_the_values_of_its_forward_too(write: Any) -> None:
    module, leaf = linear(N, K, dtype=torch.float32), X.clone().requires_grad_()
    y = module(leaf).sum()
    first = torch.autograd.grad(y, leaf, retain_graph=True)
    write(module)
    if write is nn.Module.half:
        assert torch.equal(*first, *torch.autograd.grad(y, leaf))
    else:
        with pytest.raises(RuntimeError, match="modified by an in-place operation"):
            torch.autograd.grad(y, leaf)


WRITES: dict[str, Callable[[nn.Linear], Any]] = {
    "weight": lambda m: m.weight.add_(1),
    "detach": lambda m: m.weight.detach().add_(1),
    "view": lambda m: m.weight.view(-1).add_(1),
    "part": lambda m: m.weight[:3].add_(1),
    "state_dict": lambda m: m.state_dict()["weight"].add_(1),
    "view of state_dict": lambda m: m.state_dict()["weight"].view(-1).add_(1),
    "master": lambda m: m.weight.master.add_(1),
    "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=1.0).step(),
}


@pytest.mark.parametrize("policy", ["backward", "step", False])
@pytest.mark.parametrize("write", WRITES)
def test_a_counted_write_between_forward_and_backward_raises(write: str, policy: Any) -> None:
    module = linear(N, K, dtype=torch.float32, recipe=Recipe(cache_weight=policy))
    module.weight.grad = torch.ones(N, K)
    y = module(X.clone().requires_grad_()).sum()
    with torch.no_grad():
        WRITES[write](module)
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        y.backward()
    del y
    assert module.weight.cache.nbytes() == 0 or policy == "step"


def test_the_text_of_such_a_write() -> None:
    module = linear(N, K, dtype=torch.float32)
    y = module(X.clone().requires_grad_()).sum()
    module.state_dict()["weight"].add_(1)
    assert_expected_inline(
        complaint(RuntimeError, y.backward),
        """\
the FP8 weight [128, 192] was modified by an in-place operation between a forward
and its backward, whose data gradient needs it: it is at version 3; expected version
2. Run backward before the weight changes, or forward again after""",
    )


def test_a_write_without_dgrad_does_not_raise() -> None:
    """As in plain PyTorch, whose wgrad does not read the weight either."""
    module = linear(N, K, dtype=torch.float32)
    y = module(X).sum()
    module.state_dict()["weight"].add_(1)
    y.backward()
    assert module.weight.grad is not None


@pytest.mark.parametrize("policy", ["backward", "step", False])
def test_dgrad_reads_the_values_of_its_forward_after_new_data(policy: Any) -> None:
    """As in plain PyTorch, where F.linear saves a view of the old values."""
    layers = linear(N, K, dtype=torch.float32, recipe=Recipe(cache_weight=policy)), nn.Linear(K, N)
    for module in layers:
        new, leaf = randn(N, K, seed=5, dtype=torch.float32), X.clone().requires_grad_()
        y = module(leaf).sum()
        (wanted,) = torch.autograd.grad(module(leaf).sum(), leaf)
        (other,) = torch.autograd.grad(functional.linear(leaf, new).sum(), leaf)
        module.weight.data = new
        y.backward()
        assert torch.equal(leaf.grad, wanted)
        assert not torch.equal(leaf.grad, other)


def test_a_write_to_old_values_after_new_data_raises_in_dgrad() -> None:
    module = linear(N, K, dtype=torch.float32)
    y, old = module(X.clone().requires_grad_()).sum(), module.weight.master
    module.weight.data = randn(N, K, seed=5, dtype=torch.float32)
    old.add_(1)
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        y.backward()


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_forwards_backwards_evaluations_and_steps_is_right(seed: int) -> None:
    choice = random.Random(seed)
    module = linear(N, K, dtype=torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(6):
        values = plain(module.weight).requires_grad_()
        waiting: list[tuple[Tensor, Tensor]] = []
        for _ in range(choice.randrange(12)):
            what = choice.choice(["forward", "forward", "backward", "evaluation", "drop"])
            if what == "forward":
                a, b = both([X * choice.random()])[0]
                needs_dx = choice.random() < 0.7
                pair = module(a if needs_dx else X), functional.linear(b if needs_dx else X, values)
                assert torch.equal(*pair)
                waiting.append(pair)
            elif what == "evaluation":
                with choice.choice([torch.no_grad, torch.inference_mode])():
                    assert torch.equal(module(X), functional.linear(X, values.detach()))
            elif waiting:
                taken = waiting.pop(choice.randrange(len(waiting)))
                if what == "backward":
                    again = choice.random() < 0.2
                    for output in taken:
                        output.sum().backward(retain_graph=again)
                        if again:
                            output.sum().backward()
        if values.grad is not None:
            assert torch.equal(module.weight.grad, values.grad)
        optimizer.step()
        optimizer.zero_grad()


def both(inputs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(t.clone().requires_grad_(), t.clone().requires_grad_()) for t in inputs]


def test_without_the_cache_every_use_casts_and_nothing_rests() -> None:
    cached = linear(N, K, dtype=torch.float32)
    module = linear(N, K, dtype=torch.float32, recipe=Recipe(cache_weight=False))
    (a, b), grad = both([X])[0], randn(5, N, seed=3, dtype=torch.float32)
    y, wanted = module(a), cached(b)
    assert module.weight.cache.casts == 1
    y.backward(grad), wanted.backward(grad)
    assert module.weight.cache.casts == 2
    assert module.weight.cache.nbytes() == 0
    assert torch.equal(y, wanted)
    assert torch.equal(a.grad, b.grad)
    assert torch.equal(module.weight.grad, cached.weight.grad)


def test_the_columnwise_policy_decides_what_rests_but_no_bit() -> None:
    grads, sizes = [], []
    for policy in ("on_demand", "keep"):
        module = linear(N, K, dtype=torch.float32, recipe=Recipe(columnwise=policy))
        leaf = X.clone().requires_grad_()
        waiting = module(leaf)  # its backward is still to come, so the FP8 form stays
        module(leaf).sum().backward()
        sizes.append(module.weight.cache.nbytes())
        waiting.sum().backward()
        grads.append(leaf.grad)
        assert module.weight.cache.nbytes() == 0
    assert torch.equal(*grads)
    assert sizes[1] == 2 * sizes[0] > 0


def test_a_kept_columnwise_form_of_a_transposed_view_waits_too() -> None:
    sizes = []
    for columnwise in ("on_demand", "keep"):
        weight = linear(N, K, dtype=torch.float32, recipe=Recipe(columnwise=columnwise)).weight
        y = randn(5, N, dtype=torch.float32, grad=True) @ weight
        sizes.append(weight.cache.nbytes())
        y.sum().backward()
        assert weight.cache.nbytes() == 0
    assert sizes == [FP8_BYTES, 2 * FP8_BYTES]


def test_a_part_shares_the_counter_of_its_weight() -> None:
    """Writes to the one raise in a backward of the other."""
    for write in (lambda w, part: w.add_(1), lambda w, part: part.add_(1)):
        weight = linear(256, K, dtype=torch.float32).weight
        part = weight[:N]
        y = nn.functional.linear(X.clone().requires_grad_(), part).sum()
        with torch.no_grad():
            write(weight.master, part.detach())
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            y.backward()


def test_a_layer_whose_input_needs_no_grad_keeps_nothing_either() -> None:
    module = linear(N, K, dtype=torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        module(X).sum().backward()
        optimizer.step()
    assert module.weight.cache.casts == 3
    assert module.weight.cache.nbytes() == 0


@pytest.mark.parametrize("policy", ["backward", "step", False])
def test_a_transposed_view_is_cast_once_a_use(policy: Any) -> None:
    weight = linear(N, K, dtype=torch.float32, recipe=Recipe(cache_weight=policy)).weight
    y = randn(5, N, dtype=torch.float32) @ weight
    assert weight.cache.casts == 1
    y.sum().backward()  # wgrad alone, which does not read the weight
    assert weight.cache.casts == 1
