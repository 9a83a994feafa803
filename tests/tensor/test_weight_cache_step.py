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
FP8_BYTES = N * K + 4 * 2  # two blocks


def reusing() -> Any:
    return linear(N, K, dtype=torch.float32, recipe=Recipe(cache_weight="step"))


def leaf() -> Tensor:
    return X.clone().requires_grad_()


def assert_reads_present_values(module: Any) -> None:
    assert torch.equal(module(X), functional.linear(X, plain(module.weight)))


def test_one_cast_serves_microbatches_evaluations_and_views() -> None:
    module = reusing()
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
    a, b = reusing(), nn.Linear(K, N, bias=False)
    b.weight = a.weight
    wanted = functional.linear(X, plain(a.weight))
    assert torch.equal(a(X), wanted)
    assert torch.equal(b(X), wanted)
    assert a.weight.cache.casts == 1
    x = leaf()
    (a(x) + b(x)).sum().backward()
    tied, single = a.weight.grad.clone(), plain(a.weight).requires_grad_()
    functional.linear(x, single).sum().backward()
    assert torch.equal(tied, 2 * single.grad)
    assert a.weight.cache.casts == 1


@pytest.mark.parametrize("microbatches", [1, 3])
def test_in_a_steady_state_nothing_rests_between_steps(microbatches: int) -> None:
    module = reusing()
    cache, optimizer = module.weight.cache, torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(4):
        for i in range(microbatches):
            module(leaf()).sum().backward()
            # the first version expects one, and learns better when a second comes
            held_on = i > 0 if step == 0 else i < microbatches - 1
            assert cache.nbytes() == (FP8_BYTES if held_on else 0)
        optimizer.step()
        optimizer.zero_grad()
        assert cache.casts == step + 1 + (microbatches > 1)


def test_a_changing_number_of_microbatches_costs_casts_no_more() -> None:
    module = reusing()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for microbatches in (1, 3, 2, 5, 1, 0, 2):
        for _ in range(microbatches):
            assert_reads_present_values(module)
            module(leaf()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert module.weight.cache.casts <= 15


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_releases_what_a_step_reuses(reentrant: bool) -> None:
    module = reusing()
    cache, optimizer = module.weight.cache, torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(4):
        for _ in range(2):
            checkpoint(module, leaf(), use_reentrant=reentrant).sum().backward()
        assert step == 0 or cache.nbytes() == 0
        optimizer.step()
        optimizer.zero_grad()
    assert cache.casts <= 5


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("evaluated_in", [0, 1])
def test_evaluations_do_not_delay_the_release(mode: Any, evaluated_in: int) -> None:
    """One whose graph is dropped does, in the first version alone."""
    module, held = reusing(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        if step == evaluated_in:
            with mode():
                module(X)
        module(X).sum().backward()
        held.append(module.weight.cache.nbytes() > 0)
        optimizer.step()
    assert held == [mode is torch.enable_grad and evaluated_in == 0, False, False]


def steps_elsewhere(module: Any) -> None:
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()


ENDS: dict[str, Callable[[Any], Any]] = {
    "any optimizer's step": steps_elsewhere,
    "a write that its author counts": lambda m: torch.autograd.graph.increment_version(m.weight),
    "invalidate": lambda m: m.weight.invalidate(),
    "other memory": lambda m: setattr(m.weight.master, "data", m.weight.master.clone()),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_ends_the_reuse_whatever_wrote(end: str) -> None:
    module = reusing()
    for _ in range(2):
        waiting = module(leaf())
        before = module(X)
        module.weight.detach().view(-1).data.mul_(2)
        assert torch.equal(module(X), before)  # PyTorch does not count that write
        ENDS[end](module)
        assert_reads_present_values(module)
        del waiting


def test_a_compiled_linear_is_not_reused_by_eager_ones() -> None:
    """A trace's casts belong to its graph."""
    module = reusing()
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

    def tagged() -> Tensor:
        return X.as_subclass(Tagged).detach().requires_grad_()

    module = reusing()
    cache = module.weight.cache
    for version in range(1, 3):
        for _ in range(2):
            module(tagged()).sum().backward()
        assert cache.casts == 1 + version  # the first version expects one backward
        assert cache._reuse._pending == 0
        with torch.no_grad():
            module.weight.mul_(1.5)
    losses = [module(tagged()).sum() for _ in range(3)]
    assert cache.casts == 4
    for loss in losses:
        loss.backward()
    assert cache.casts == 4
