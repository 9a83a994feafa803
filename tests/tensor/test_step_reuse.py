"""Recipe(cache_weight="step"): one cast per version, released after its last backward."""

from __future__ import annotations

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


STEP = Recipe(cache_weight="step")


def test_one_cast_serves_microbatches_evaluations_and_views() -> None:
    module = linear(N, K, dtype=torch.float32, recipe=STEP)
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
    a, b = linear(N, K, dtype=torch.float32, recipe=STEP), nn.Linear(K, N, bias=False)
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
    module = linear(N, K, dtype=torch.float32, recipe=STEP)
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
    module = linear(N, K, dtype=torch.float32, recipe=STEP)
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
    module = linear(N, K, dtype=torch.float32, recipe=STEP)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        with mode():
            module(X)
        module(X).sum().backward()
        assert module.weight.cache.nbytes() == 0
        optimizer.step()


@pytest.mark.parametrize("dropped_in", [0, 1])
def test_a_graph_that_is_dropped_holds_the_bytes_in_the_first_version_only(dropped_in: int) -> None:
    module = linear(N, K, dtype=torch.float32, recipe=STEP)
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
    module = linear(N, K, dtype=torch.float32, recipe=STEP)
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


def both(inputs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(t.clone().requires_grad_(), t.clone().requires_grad_()) for t in inputs]


def test_an_optimizers_step_ends_the_reuse_whatever_it_writes_through() -> None:
    module = linear(N, K, dtype=torch.float32, recipe=STEP)
    shard = module.weight.detach().view(-1)
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        held = module(X.clone().requires_grad_())
        shard.data.mul_(2)
        other(torch.ones(2)).sum().backward()
        optimizer.step()
        assert torch.equal(module(X), functional.linear(X, plain(module.weight)))
        del held


def test_other_memory_of_the_master_ends_it_too() -> None:
    module = linear(N, K, dtype=torch.float32, recipe=STEP)
    module(X)
    module.weight.master.data = randn(N, K, seed=5, dtype=torch.float32)
    assert torch.equal(module(X), functional.linear(X, plain(module.weight)))


def test_a_write_that_its_author_counts_ends_it_too() -> None:
    """As of a kernel that is no torch op."""
    module = linear(N, K, dtype=torch.float32, recipe=STEP)
    module(X)
    module.weight.detach().view(-1).data.mul_(2)
    torch.autograd.graph.increment_version(module.weight)
    assert torch.equal(module(X), functional.linear(X, plain(module.weight)))


def test_a_kept_columnwise_form_is_reused_too() -> None:
    held = []
    for columnwise in ("on_demand", "keep"):
        recipe = Recipe(cache_weight="step", columnwise=columnwise)
        module = linear(N, K, dtype=torch.float32, recipe=recipe)
        waiting = [module(X.clone().requires_grad_()) for _ in range(2)]
        waiting.pop().sum().backward()
        held.append(module.weight.cache.nbytes())
    assert held == [N * K + 4 * 2, 2 * (N * K + 4 * 2)]


def test_a_compiled_linear_is_not_reused_by_eager_ones() -> None:
    """A trace's casts belong to its graph."""
    module = linear(N, K, dtype=torch.float32, recipe=STEP)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for step in range(2):
        x = randn(5, K, seed=step, dtype=torch.float32, grad=True)
        y = compiled(x)
        for form in module.weight.cache.held():
            assert form is None or type(form.data) is Tensor
        assert torch.equal(y, functional.linear(x, plain(module.weight)))
        assert torch.equal(module(x), y)
        y.sum().backward()
        with torch.no_grad():
            module.weight.mul_(1.5)


def test_inputs_of_another_type_find_the_cast() -> None:
    """Their linears run as those that are traced."""

    class Tagged(torch.Tensor):
        pass

    module = linear(N, K, dtype=torch.float32, recipe=STEP)
    for version in range(1, 3):
        for _ in range(2):
            y = module(X.as_subclass(Tagged).detach().requires_grad_())
            y.sum().backward()
        assert module.weight.cache.casts == 1 + version  # the first version expects one backward
        assert module.weight.cache._reuse._pending == 0
        with torch.no_grad():
            module.weight.mul_(1.5)
    before = module.weight.cache.casts
    losses = [module(X.as_subclass(Tagged).detach().requires_grad_()).sum() for _ in range(3)]
    assert module.weight.cache.casts == before + 1
    for loss in losses:
        loss.backward()
    assert module.weight.cache.casts == before + 1


def test_invalidate_ends_it_too() -> None:
    module = linear(N, K, dtype=torch.float32, recipe=STEP)
    before = module(X)
    module.weight.detach().view(-1).data.mul_(2)
    assert torch.equal(module(X), before)  # not counted
    module.weight.invalidate()
    assert torch.equal(module(X), functional.linear(X, plain(module.weight)))
