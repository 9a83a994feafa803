"""What a run keeps of an input: as long as it is of use, whatever the forward goes through."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from blocktensor import BlockwiseFP8Weight, functional, share_inputs
from blocktensor.autograd.shared_cast import SharedCasts, this_thread
from blocktensor.ops import reference
from blocktensor.ops.formats import BlockFormat, Quantized
from tests.support.models import randn
from tests.support.reference_ops import replace_op
from tests.support.siblings import (
    Casts,
    K,
    Mlp,
    Qkv,
    X,
    assert_same,
    casts,
    converted,
    results,
)

__all__ = ["casts"]


def test_views_of_a_tensor_share_its_cast_and_aliases_do_not() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, K), nn.Linear(K, K)

        def forward(self, x: Tensor) -> Tensor:
            alias = x.detach()  # of the same memory and another tensor
            self.a(x), self.b(alias)
            self.a(x[:]), self.b(x.view(1, -1, K))
            self.a(x[1:]), self.b(x[:-1])  # other rows
            return x

    model = converted(Views())
    report = share_inputs(model)
    model(X)
    assert (report.casts, report.saved) == (5, 1)
    assert report.groups[0].together == (("a",), ("b",), ("a", "b"))


def test_more_users_than_expected_and_fewer(casts: Casts) -> None:
    model = converted(Qkv())
    share_inputs(model)
    model(X)
    counts = []
    for more in (True, True, False, True):
        model.between = (lambda x: (model.q(x), model.q(x))) if more else None
        casts.clear()
        model(X)
        counts.append(len(casts))
    assert counts == [3, 2, 2, 2]  # o's too; one cast more, once


# Recomputation and threads


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, casts: Casts) -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=reentrant)

    shared, unshared = (
        converted(nn.Sequential(Qkv(), Mlp())),
        converted(nn.Sequential(Qkv(), Mlp())),
    )
    report = share_inputs(shared)
    for step in range(1, 3):
        wanted = results(unshared, X, run)
        casts.clear()
        assert_same(results(shared, X, run), wanted)
        assert report.casts == 8 * step  # two a module and pass
        assert len(casts) == 8 + 7  # and those of gradients
        assert casts.alive() == 0


def test_selective_checkpointing_gets_what_it_kept() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = "quantize" in str(op)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def run(model: nn.Module, x: Tensor) -> Tensor:
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        return checkpoint(model, x, use_reentrant=False, context_fn=contexts)

    shared, unshared = converted(Qkv()), converted(Qkv())
    share_inputs(shared)
    shared(X)
    shared.between = lambda x: shared.q(x)  # more uses than expected: the passes would differ
    unshared.between = lambda x: unshared.q(x)
    assert_same(results(shared, X, run), results(unshared, X, run))


def test_threads_share_no_input(casts: Casts) -> None:
    shared, unshared = converted(Qkv()), converted(Qkv())
    inputs = [randn(4, K, seed=i, dtype=torch.float32) for i in range(4)]
    wanted = [unshared(x) for x in inputs]
    barrier = threading.Barrier(4, timeout=60)
    shared.between = lambda x: barrier.wait()
    share_inputs(shared)
    casts.clear()
    outputs: dict[int, Tensor] = {}

    def work(i: int) -> None:
        for _ in range(5):
            outputs[i] = shared(inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(casts) == 4 * 5 * 2
    assert all(torch.equal(outputs[i], wanted[i]) for i in range(4))


# What stays


def test_the_cast_goes_with_its_last_user_and_the_input_with_the_forward(casts: Casts) -> None:
    model = converted(Qkv())
    share_inputs(model)
    inputs: list[weakref.ref[Tensor]] = []
    model.between = lambda x: inputs.append(weakref.ref(x))
    alive = []
    model.v.register_forward_hook(lambda *_: alive.append(casts.alive()))
    model.o.register_forward_pre_hook(lambda *_: alive.append(casts.alive()))
    for _ in range(2):
        with torch.no_grad():
            model(X)
        assert inputs[-1]() is None
        assert casts.alive() == 0
        y = model(X.clone().requires_grad_())
        assert casts.alive() == 0  # the rowwise bytes
        y.sum().backward()
        del y
        assert casts.alive() == 0
        assert inputs[-1]() is None
    assert alive == [1, 1] + [0, 0] * 3  # from the second run on, the last user is known


def test_nothing_outlives_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    columnwise, cast = [], reference.quantize_both

    def watched(x: Tensor, *formats: BlockFormat) -> tuple[Quantized, Quantized]:
        made = cast(x, *formats)
        columnwise.append(weakref.ref(made[1].data))
        return made

    replace_op(monkeypatch, "quantize_both", watched)
    model = converted(Qkv())
    share_inputs(model)
    for _ in range(2):
        columnwise.clear()
        y = model(X.clone().requires_grad_())
        assert [ref() is not None for ref in columnwise] == [True, True]
        y.sum().backward()
        assert [ref() for ref in columnwise] == [None] * 6  # with those of four gradients


@pytest.mark.parametrize("runs_before", [0, 1])
def test_an_exception_leaves_nothing(runs_before: int, casts: Casts) -> None:
    model = converted(Qkv())
    report = share_inputs(model)
    for _ in range(runs_before):
        model(X)

    def fail(x: Tensor) -> None:
        held.append(x)
        raise ArithmeticError

    held: list[Tensor] = []
    model.between = fail
    with pytest.raises(ArithmeticError):
        model(X)
    assert casts.alive() == 0
    casts.clear()
    model.q(held[0]), model.k(held[0]), model.v(held[0])
    assert len(casts) == 3  # outside of the forward nothing is shared
    model.between = None
    casts.clear()
    saved = report.saved
    model(X)
    assert len(casts) == 2  # the failed run is no example
    assert report.saved == saved + 2


def test_an_input_that_dies_takes_its_cast_along(casts: Casts) -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, K), nn.Linear(K, K)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x + 1)
            alive.append(casts.alive())
            return y + self.b(x + 2)  # in the place of the first

    alive: list[int] = []
    model = converted(Sequence())
    with torch.no_grad():
        wanted = model(X)
        report = share_inputs(model)
        assert torch.equal(model(X), wanted)
    assert alive == [0, 0]
    assert report.groups[0].together == (("a",), ("b",))


def test_a_model_is_freed_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        model = converted(Qkv())
        report = share_inputs(model)
        model(X)
        weight = weakref.ref(model.q)
        del model
        assert weight() is None
        assert report.casts == 2
    finally:
        gc.enable()


# An input that is not what it was


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2),
        lambda x: x[1:].zero_(),
        lambda x: setattr(x, "data", x.data * 2),
        lambda x: x.t_().t_().neg_(),
    ],
)
def test_an_input_changed_in_place_is_cast_again(change: Callable[[Tensor], Any]) -> None:
    def changed(x: Tensor) -> None:
        with torch.no_grad():
            change(x)

    shared, unshared = converted(Qkv(between=changed)), converted(Qkv(between=changed))
    share_inputs(shared)
    for _ in range(2):
        assert_same(results(shared, X), results(unshared, X))


@pytest.mark.parametrize("new", [lambda x: x[:1], lambda x: x.as_strided(x.shape, (0, 1))])
def test_data_of_another_layout_in_the_same_place_is_cast_again(
    new: Callable[[Tensor], Tensor],
) -> None:
    def changed(x: Tensor) -> None:
        x.data = new(x.data)

    shared, unshared = converted(Qkv(between=changed)), converted(Qkv(between=changed))
    share_inputs(shared)
    with torch.no_grad():
        assert torch.equal(shared(X), unshared(X))


def test_inference_tensors_whose_changes_are_not_counted() -> None:
    model = converted(Qkv(between=lambda x: x.mul_(2)))
    with torch.inference_mode():
        wanted = model(X)
        share_inputs(model)
        assert torch.equal(model(X), wanted)


def test_group_ends_that_change_are_read_again() -> None:
    x = randn(512, 256)
    stacks = (randn(2, 128, 256, seed=seed) for seed in (1, 2))
    first, second = (BlockwiseFP8Weight(stack).requires_grad_() for stack in stacks)

    def wgrad(shares: bool) -> Tensor:
        offs, casts = torch.tensor([100, 512], dtype=torch.int32), SharedCasts()
        if shares:
            casts.begin()
        functional.grouped_linear(x, first, offs)
        offs.copy_(torch.tensor([300, 512]))
        y = functional.grouped_linear(x, second, offs)
        if shares:
            casts.end(True)
        (grad,) = torch.autograd.grad(y.float().square().sum(), [second])
        return grad

    assert torch.equal(wgrad(True), wgrad(False))


def test_a_run_that_ends_ends_those_within_it() -> None:
    runs = [SharedCasts() for _ in range(3)]
    for run in runs:
        run.begin()
    try:
        runs[0].end(whole=False)
        assert this_thread.running is None
    finally:
        this_thread.running = None
