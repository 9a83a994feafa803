"""The FP8 form of a trainable weight: cast once per version, released after its last backward."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, functional
from tests.support.models import linear, plain, randn

N, K = 128, 192
X = randn(5, K, dtype=torch.float32)


def test_one_cast_serves_microbatches_evaluations_and_views() -> None:
    module = linear(N, K, dtype=torch.float32)
    weight = module.weight
    for version in range(1, 4):
        losses = []
        for i in range(3):  # as a pipeline does: all forwards, then all backwards
            losses.append(module(randn(5, K, seed=i, dtype=torch.float32, grad=True)).sum())
            with torch.no_grad():
                module(X), X @ weight.t(), X @ weight.detach().T
            with torch.inference_mode():
                module(X)
        for loss in losses:
            loss.backward()
        assert weight.cache.casts == version
        with torch.no_grad():
            weight.mul_(1.5)


def test_tied_modules_share_one_cast() -> None:
    a, b = linear(N, K, dtype=torch.float32), nn.Linear(K, N, bias=False)
    b.weight = a.weight
    wanted = functional.linear(X, plain(a.weight))
    assert torch.equal(a(X), wanted)
    assert torch.equal(b(X), wanted)
    assert a.weight.cache.casts == 1
    leaf = X.clone().requires_grad_()
    (a(leaf) + b(leaf)).sum().backward()
    tied, single = a.weight.grad.clone(), plain(a.weight).requires_grad_()
    functional.linear(leaf, single).sum().backward()
    assert torch.equal(tied, 2 * single.grad)
    assert a.weight.cache.casts == 1


@pytest.mark.parametrize("microbatches", [1, 3])
def test_in_a_steady_state_nothing_rests_between_steps(microbatches: int) -> None:
    module = linear(N, K, dtype=torch.float32)
    cache, optimizer = module.weight.cache, torch.optim.SGD(module.parameters(), lr=0.1)
    fp8_bytes = N * K + 4 * 2  # two blocks
    for step in range(4):
        for i in range(microbatches):
            module(X.clone().requires_grad_()).sum().backward()
            # the first version expects one, and learns better when a second comes
            held_on = i > 0 if step == 0 else i < microbatches - 1
            assert cache.nbytes() == (fp8_bytes if held_on else 0)
        optimizer.step()
        optimizer.zero_grad()
        assert cache.casts == step + 1 + (microbatches > 1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_releases_too(reentrant: bool) -> None:
    module = linear(N, K, dtype=torch.float32)
    cache, optimizer = module.weight.cache, torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(4):
        for _ in range(2):
            leaf = X.clone().requires_grad_()
            checkpoint(module, leaf, use_reentrant=reentrant).sum().backward()
        assert step == 0 or cache.nbytes() == 0
        optimizer.step()
        optimizer.zero_grad()
    assert cache.casts <= 5


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluations_do_not_delay_the_release(mode: Callable[[], Any]) -> None:
    module = linear(N, K, dtype=torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        with mode():
            module(X)
        module(X).sum().backward()
        assert module.weight.cache.nbytes() == 0
        optimizer.step()


@pytest.mark.parametrize("dropped_in", [0, 1])
def test_a_graph_that_is_dropped_holds_the_bytes_in_the_first_version_only(dropped_in: int) -> None:
    module = linear(N, K, dtype=torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    held = []
    for step in range(3):
        if step == dropped_in:
            module(X)  # an evaluation without no_grad
        module(X).sum().backward()
        held.append(module.weight.cache.nbytes() > 0)
        optimizer.step()
    assert held == [dropped_in == 0, False, False]


def test_a_changing_number_of_microbatches_stays_right() -> None:
    module = linear(N, K, dtype=torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step, microbatches in enumerate((1, 3, 2, 5, 1, 0, 2)):
        values = plain(module.weight).requires_grad_()
        inputs = [randn(4, K, seed=7 * step + i, dtype=torch.float32) for i in range(microbatches)]
        outputs = [(module(a), functional.linear(b, values)) for a, b in both(inputs)]
        for y, wanted in outputs:
            assert torch.equal(y, wanted)
            y.backward(torch.ones_like(y)), wanted.backward(torch.ones_like(y))
        if microbatches:
            assert torch.equal(module.weight.grad, values.grad)
        optimizer.step()
        optimizer.zero_grad()
    assert module.weight.cache.casts <= 15  # a wrong guess costs a cast, no more


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


def test_a_layer_whose_input_needs_no_grad_keeps_nothing_either() -> None:
    module = linear(N, K, dtype=torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        module(X).sum().backward()
        optimizer.step()
    assert module.weight.cache.casts == 3
    assert module.weight.cache.nbytes() == 0


@pytest.mark.parametrize("cached", [False, True])
def test_a_transposed_view_is_cast_once_a_use(cached: bool) -> None:
    weight = linear(N, K, dtype=torch.float32, recipe=Recipe(cache_weight=cached)).weight
    y = randn(5, N, dtype=torch.float32) @ weight
    assert weight.cache.casts == 1
    y.sum().backward()  # wgrad alone, which does not read the weight
    assert weight.cache.casts == 1
