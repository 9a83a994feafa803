"""No FP8 form outlives the values it was cast from, by whatever route the values change.

Each route is taken on a plain linear and on its converted twin; then the twin must hold the same
values and multiply by them. Every forward casts, so this must hold for writes that PyTorch does not
count too; with ``Recipe(cache_weight="step")``, for those that it counts.
(Optimizers and initialisation: ``test_weight.py``.)
"""

from __future__ import annotations

import copy
import ctypes
import threading
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

N, K = 128, 192
STEP = Recipe(cache_weight="step")
X = randn(5, K, dtype=torch.float32)
NEW = randn(N, K, seed=11, dtype=torch.float32)


# Every way to change the values makes the next use cast again


def no_grad(change: Callable[[nn.Linear], Any]) -> Callable[[nn.Linear], Any]:
    def run(module: nn.Linear) -> None:
        with torch.no_grad():
            change(module)

    return run


def inference(change: Callable[[nn.Linear], Any]) -> Callable[[nn.Linear], Any]:
    def run(module: nn.Linear) -> None:
        with torch.inference_mode():
            change(module)

    return run


def held(view: Callable[[Tensor], Tensor]) -> Callable[[nn.Linear], Any]:
    """Change through a view taken before the forward that fills the cache."""

    def run(module: nn.Linear) -> None:
        taken = view(module.weight)
        module(X)
        with torch.no_grad():
            taken.mul_(2)

    return run


def in_thread(module: nn.Linear) -> None:
    thread = threading.Thread(target=lambda: module.weight.data.mul_(2))
    thread.start()
    thread.join()


def as_vector(module: nn.Linear) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(2 * vector, module.parameters())


def set_data(module: nn.Linear) -> None:
    module.weight.data = NEW.clone()


def swap_with_average(module: nn.Linear) -> None:
    average = (module.weight.detach() + NEW) / 2
    module.weight.data, average = average, module.weight.data


def swap(module: nn.Linear) -> None:
    wrap = BlockwiseFP8Weight if isinstance(module.weight, BlockwiseFP8Weight) else Tensor.detach
    torch.utils.swap_tensors(module.weight, nn.Parameter(wrap(NEW.clone())))


def of_master(module: nn.Linear) -> None:
    getattr(module.weight, "master", module.weight.detach()).mul_(2)


ROUTES: dict[str, Callable[[nn.Linear], Any]] = {
    "copy_": no_grad(lambda m: m.weight.copy_(NEW)),
    "mul_": no_grad(lambda m: m.weight.mul_(2)),
    "data.mul_": lambda m: m.weight.data.mul_(2),
    "data.copy_": lambda m: m.weight.data.copy_(NEW),
    "data =": set_data,
    "detach().mul_": lambda m: m.weight.detach().mul_(2),
    "view(-1).mul_": no_grad(lambda m: m.weight.view(-1).mul_(2)),
    "[:3].zero_": no_grad(lambda m: m.weight[:3].zero_()),
    "[0].zero_": no_grad(lambda m: m.weight[0].zero_()),
    "[0] = 0": no_grad(lambda m: m.weight.__setitem__(0, 0.0)),
    "[:, 3:5] = 1": no_grad(lambda m: m.weight.__setitem__(slice(3, 5), 1.0)),
    "t().mul_": no_grad(lambda m: m.weight.t().mul_(2)),
    "t()[3].mul_": no_grad(lambda m: m.weight.t()[3].mul_(2)),
    "t().data.mul_": lambda m: m.weight.t().data.mul_(2),
    "T.copy_": no_grad(lambda m: m.weight.T.copy_(NEW.t())),
    "rows": no_grad(lambda m: [row.mul_(2) for row in m.weight]),
    "diagonal": no_grad(lambda m: m.weight.diagonal().fill_(9)),
    "as_strided": no_grad(lambda m: m.weight.as_strided((3, 3), (K, 1)).zero_()),
    "fill_diagonal_": no_grad(lambda m: m.weight.fill_diagonal_(9)),
    "index_put_": no_grad(lambda m: m.weight.index_put_((torch.tensor([1]),), torch.ones(()))),
    "masked_fill_": no_grad(lambda m: m.weight.masked_fill_(NEW > 0, 3)),
    "lerp_": no_grad(lambda m: m.weight.lerp_(NEW, 0.5)),
    "addcmul_": no_grad(lambda m: m.weight.addcmul_(NEW, NEW)),
    "clamp_": no_grad(lambda m: m.weight.clamp_(-0.01, 0.01)),
    "out=": no_grad(lambda m: torch.mul(NEW, 2, out=m.weight)),
    "data = of the master": lambda m: setattr(getattr(m.weight, "master", m.weight), "data", NEW),
    "set_": no_grad(lambda m: m.weight.set_(NEW.clone())),
    "_foreach_mul_": no_grad(lambda m: torch._foreach_mul_([m.weight], 2)),
    "_foreach_lerp_": no_grad(lambda m: torch._foreach_lerp_([m.weight], [NEW], 0.5)),
    "_foreach_copy_": no_grad(lambda m: torch._foreach_copy_([m.weight], [NEW])),
    "vector_to_parameters": as_vector,
    "swap_tensors": swap,
    "swap with an average": swap_with_average,
    "of the master": of_master,
    "in a thread": in_thread,
    "reset_parameters": lambda m: (torch.manual_seed(5), m.reset_parameters()),
    "load_state_dict": lambda m: m.load_state_dict({"weight": NEW}),
    "load_state_dict(assign=True)": lambda m: m.load_state_dict({"weight": NEW}, assign=True),
    "to and back": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "half and back": lambda m: m.half().float(),
    "_apply": lambda m: m._apply(lambda t: t * 2),
    "held view": held(lambda w: w.detach().view(-1)),
    "held data": held(lambda w: w.data),
    "held view of data": held(lambda w: w.data.view(-1)),
    "held row": held(lambda w: w.detach()[3]),
    "held transpose": held(lambda w: w.detach().t()),
    "held chunk": held(lambda w: w.data.chunk(2)[1]),
    "inference mul_": inference(lambda m: m.weight.mul_(2)),
    "inference data.mul_": inference(lambda m: m.weight.data.mul_(2)),
    "inference detach().mul_": inference(lambda m: m.weight.detach().mul_(2)),
    "inference view.mul_": inference(lambda m: m.weight.view(-1).mul_(2)),
}


@pytest.mark.parametrize("recipe", [Recipe(), STEP], ids=["backward", "step"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_change_is_noticed(route: str, recipe: Recipe) -> None:
    assert_noticed(ROUTES[route], recipe, waits=route not in SWAPS)


SWAPS = {"swap_tensors", "to and back", "half and back"}
"""Routes that torch refuses while a graph holds the parameter."""


def assert_noticed(
    route: Callable[[nn.Linear], Any], recipe: Recipe, *, waits: bool = True
) -> None:
    twins = pair(N, K, recipe=recipe)
    waiting = twins[1](X.clone().requires_grad_()) if waits else None
    with torch.no_grad():
        before = twins[1](X)
    for module in twins:
        route(module)
    assert_twins(*twins)
    assert not torch.equal(twins[1](X), before)
    del waiting


def flattened(module: nn.Linear) -> Tensor:
    """As an optimizer that keeps all parameters in one buffer."""
    flat = module.weight.detach().clone().view(-1)
    module.weight.data = flat.view_as(module.weight)
    return flat


UNCOUNTED: dict[str, Callable[[nn.Linear], Any]] = {
    "data of a flat view": lambda m: m.weight.detach().view(-1).data.mul_(2),
    "data of a part": lambda m: m.weight[3:].data.mul_(2),
    "data of a row": lambda m: m.weight.detach()[3].data.zero_(),
    "data of state_dict": lambda m: m.state_dict()["weight"].data.mul_(2),
    "data of the flat buffer": lambda m: flattened(m).data.mul_(2),
    "data of the master": lambda m: getattr(m.weight, "master", m.weight).data.mul_(2),
    "numpy": lambda m: m.state_dict()["weight"].numpy().__imul__(2),
    "dlpack": lambda m: torch.from_dlpack(m.state_dict()["weight"]).mul_(2),
    "storage": lambda m: m.state_dict()["weight"].untyped_storage().fill_(1),
    "pointer": lambda m: ctypes.memset(m.state_dict()["weight"].data_ptr(), 0, 4 * N * K),
}


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
