"""No FP8 form outlives the values it was cast from, by whatever route the values change.

Each route is taken on a plain linear and on its converted twin; then the twin must hold the same
values and multiply by them. Every forward casts, so this must hold for writes that PyTorch does not
count too; with ``Recipe(cache_weight="step")``, for those that it counts.
(Optimizers and initialisation: ``test_weight.py``.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Weight, Recipe, functional
from tests.support.models import assert_twins, linear, pair, plain, randn
from tests.support.writes import COUNTED, SWAPS, UNCOUNTED, Write

N, K = 128, 192
STEP = Recipe(cache_weight="step")
X = randn(5, K, dtype=torch.float32)
NEW = randn(N, K, seed=11, dtype=torch.float32)


# Every way to change the values makes the next use cast again


@pytest.mark.parametrize("recipe", [Recipe(), STEP], ids=["backward", "step"])
@pytest.mark.parametrize("route", COUNTED)
def test_a_change_is_noticed(route: str, recipe: Recipe) -> None:
    assert_noticed(COUNTED[route], recipe, waits=route not in SWAPS)


def assert_noticed(route: Write, recipe: Recipe, *, waits: bool = True) -> None:
    twins = pair(N, K, recipe=recipe)
    waiting = twins[1](X.clone().requires_grad_()) if waits else None
    with torch.no_grad():
        before = twins[1](X)
    for module in twins:
        route(module)
    assert_twins(*twins)
    assert not torch.equal(twins[1](X), before)
    del waiting


COUNTED_AFTER_ALL = {"data of the flat buffer", "data of a part"}
"""Plain PyTorch does not count them."""


@pytest.mark.parametrize("route", UNCOUNTED)
def test_a_write_that_pytorch_does_not_count_is_noticed(route: str) -> None:
    assert_noticed(UNCOUNTED[route], Recipe())


@pytest.mark.parametrize("route", [r for r in UNCOUNTED if r not in COUNTED_AFTER_ALL])
def test_reuse_within_a_step_needs_invalidate_for_it(route: str) -> None:
    module = linear(N, K, dtype=torch.float32, recipe=STEP)
    before = module(X)
    UNCOUNTED[route](module)
    assert torch.equal(module(X), before)
    module.weight.invalidate()
    assert torch.equal(module(X), functional.linear(X, plain(module.weight)))
    assert not torch.equal(module(X), before)


def test_a_weight_made_in_inference_mode_is_cast_at_every_use() -> None:
    with torch.inference_mode():
        module = linear(N, K, dtype=torch.float32)
        for factor in (2, 3):
            module.weight.mul_(factor)
            assert torch.equal(module(X), functional.linear(X, plain(module.weight)))
        assert module.weight.cache.nbytes() == 0


# Several weights at once


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)], ids=["SWA", "EMA"])
def test_averages_of_a_model_follow_it(average: Callable[..., Any] | None) -> None:
    model = linear(N, K, dtype=torch.float32)
    averaged = AveragedModel(model, multi_avg_fn=average)
    outputs = []
    for _ in range(3):
        averaged.update_parameters(model)
        for module in (averaged.module, model):
            outputs.append(module(X))
            assert torch.equal(outputs[-1], functional.linear(X, plain(module.weight)))
        with torch.no_grad():
            model.weight.mul_(2)
    assert not any(torch.equal(outputs[i], outputs[i - 2]) for i in range(2, 6))


def test_a_weight_lent_for_one_call_serves_that_call_only() -> None:
    module = linear(N, K, dtype=torch.float32)
    before = module(X)
    lent = functional_call(module, {"weight": BlockwiseFP8Weight(NEW)}, (X,))
    assert torch.equal(lent, functional.linear(X, NEW))
    assert torch.equal(module(X), before)


def test_a_change_of_a_copy_leaves_the_original_alone_and_the_reverse() -> None:
    module = linear(N, K, dtype=torch.float32)
    before = module(X)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.mul_(2)
    assert torch.equal(module(X), before)
    changed = twin(X)
    assert torch.equal(changed, functional.linear(X, plain(twin.weight)))
    with torch.no_grad():
        module.weight.zero_()
    assert torch.equal(twin(X), changed)
    assert torch.equal(module(X), torch.zeros_like(before))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": Tensor.detach,
    "data": lambda w: w.data,
    "transposed twice": lambda w: w.detach().t().t(),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "collective",
    [
        lambda w: dist.broadcast(w, 0),
        lambda w: dist.all_reduce(w),
        lambda w: dist.all_reduce(w, async_op=True).wait(),
        lambda w: dist.scatter(w, [plain(w)], 0),
        lambda w: dist.all_gather([w], plain(w)),
    ],
    ids=["broadcast", "all_reduce", "async all_reduce", "scatter", "all_gather"],
)
@pytest.mark.parametrize("view", VIEWS)
def test_what_a_collective_writes_is_noticed(
    collective: Callable[[Tensor], Any], view: str
) -> None:
    module = linear(N, K, dtype=torch.float32, recipe=STEP)
    before = module(X)
    # One process receives nothing: what others would send is there already, unnoticed so far.
    module.weight.master.numpy()[:] *= 2
    assert torch.equal(module(X), before)
    collective(VIEWS[view](module.weight))
    assert torch.equal(module(X), functional.linear(X, plain(module.weight)))
    assert not torch.equal(module(X), before)


# One cast a step


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_eight_microbatches_share_one_cast_a_step(way: str, reentrant: bool | None) -> None:
    layers = (linear(*shape, dtype=torch.float32, recipe=STEP) for shape in ((N, K), (K, N)))
    model = nn.Sequential(*layers)
    caches = [layer.weight.cache for layer in model]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **{way: True})
    casts = []
    for _ in range(4):
        for i in range(8):
            x = randn(5, K, seed=i, dtype=torch.float32, grad=True)
            y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
            y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        casts.append([cache.casts for cache in caches])
        assert [cache.nbytes() for cache in caches] == [0, 0] or len(casts) == 1
    first = casts[0][0]
    assert first <= 2  # learns how many there are
    assert casts == [[first + step] * 2 for step in range(4)]
