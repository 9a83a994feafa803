"""No FP8 form outlives the values it was cast from, by whatever route the values change.

Each route is taken on a plain linear and on its converted twin; then the twin must hold the same
values and multiply by them. Every forward casts, so this must hold for writes that PyTorch does not
count too; those that it counts make the backward of an earlier forward raise.
(Optimizers and initialisation: ``test_weight.py``.) Then random sequences of writes, forwards,
backwards and steps: ``BLOCKTENSOR_FUZZ=2000 pytest tests/end_to_end/test_staleness.py``.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from blocktensor import BlockwiseFP8Weight, Recipe, functional
from tests.support.models import RECIPES, assert_twins, in_a_layer, linear, pair, plain, randn
from tests.support.writes import COUNTED, SWAPS, UNCOUNTED, Write

N, K = 128, 192
X = randn(5, K, dtype=torch.float32)
NEW = randn(N, K, seed=11, dtype=torch.float32)
MODIFIED = r"modified by an in-?place operation"


# Every way to change the values makes the next use cast again


REPLACED = {
    "data =",
    "data = of the master",
    "swap with an average",
    "load_state_dict(assign=True)",
    "vector_to_parameters",
    "to and back",
    "half and back",
    "_apply",
}
"""Routes by which the weight gets other memory: an earlier forward keeps what it read."""


@pytest.mark.parametrize("route", COUNTED | UNCOUNTED)
def test_a_change_is_noticed(route: str) -> None:
    twins = pair(N, K)
    waiting = None if route in SWAPS else twins[1](X.clone().requires_grad_()).sum()
    with torch.no_grad():
        before = twins[1](X)
    for module in twins:
        (COUNTED | UNCOUNTED)[route](module)
    assert_twins(*twins)
    assert not torch.equal(twins[1](X), before)
    if waiting is not None and route in COUNTED.keys() - REPLACED:
        with pytest.raises(RuntimeError, match=MODIFIED):
            waiting.backward()


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
def test_what_a_collective_writes_is_noticed(collective: Any, view: str) -> None:
    module = linear(N, K, dtype=torch.float32)
    waiting = module(X.clone().requires_grad_())
    # one process receives nothing: what others would send is there already
    module.weight.master.numpy()[:] *= 2
    collective(VIEWS[view](module.weight))
    assert torch.equal(module(X), functional.linear(X, plain(module.weight)))
    assert not torch.equal(module(X), waiting)
    with pytest.raises(RuntimeError, match=MODIFIED):
        waiting.sum().backward()


# Random sequences

SEQUENCES = int(os.environ.get("BLOCKTENSOR_FUZZ", "150"))
WIDTHS = (64, 160, 64)
OPTIMIZERS: tuple[Callable[[list[Tensor]], torch.optim.Optimizer], ...] = (
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
    lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    lambda p: torch.optim.Adagrad(p, lr=0.01),
)
COLLECTIVES: dict[str, Write] = {
    "broadcast of a view": lambda m: dist.broadcast(m.weight.detach().view(-1), 0),
    "all_reduce of the state": lambda m: dist.all_reduce(m.state_dict()["weight"]),
}
WRITES = COUNTED | UNCOUNTED | COLLECTIVES
CPU_ONLY = {"numpy", "pointer", *COLLECTIVES}


def small(module: Any) -> None:
    """Keep repeated writes from overflowing; seldom, as it counts and so may hide a stale form."""
    if module.weight.abs().max() > 4:
        with torch.no_grad():
            module.weight.clamp_(-4, 4)


def wait_for_graphs_of(weight: Tensor) -> None:
    """Wait until the thread of the last backward frees its graph: swaps refuse saved tensors.

    ``backward`` on a GPU returns before that.
    """
    deadline = time.monotonic() + 10
    while weight._use_count() > 2 and time.monotonic() < deadline:
        time.sleep(1e-3)


class Player:
    """A model, and the moves of one random sequence."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.choice = random.Random(seed)
        policy: Any = self.choice.choice(["backward", False])
        self.recipe = Recipe(self.choice.choice(RECIPES).scale, cache_weight=policy)
        options: Any = {"dtype": torch.float32, "device": device, "recipe": self.recipe}
        pairs = zip(WIDTHS[1:], WIDTHS, strict=False)
        self.model = nn.Sequential(*(linear(*s, **options) for s in pairs))
        self.optimizer = self.choice.choice(OPTIMIZERS)([*self.model.parameters()])
        self.waiting: list[tuple[Tensor, int]] = []
        self.device, self.writes, self.seen = device, 0, Counter[str]()
        self.writable = [w for w in WRITES if device.type == "cpu" or w not in CPU_ONLY]

    def x(self) -> Tensor:
        seed = self.choice.randrange(1000)
        return randn(5, WIDTHS[0], seed=seed, dtype=torch.float32, device=self.device)

    def check(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        wanted = x.detach()
        for layer in self.model:
            wanted = functional.linear(wanted, plain(layer.weight).clone(), recipe=self.recipe)
        y = run(x)
        assert torch.equal(y, wanted), self.seen
        return y

    def move(self) -> None:
        moves = {"write": 5, "forward": 4, "backward": 4, "step": 1, "evaluate": 2, "view": 1}
        name = self.choice.choices(list(moves), list(moves.values()))[0]
        self.seen[name] += 1
        getattr(self, name)()

    def write(self) -> None:
        name = self.choice.choice(self.writable)
        self.seen[name] += 1
        layer = self.choice.choice(self.model)
        if name in SWAPS:
            self.waiting.clear()
            wait_for_graphs_of(layer.weight)
        WRITES[name](layer)
        small(layer)
        self.writes += 1

    def forward(self) -> None:
        if len(self.waiting) == 4:
            self.waiting.pop(0)
        x = self.x().requires_grad_()
        again = self.choice.choice([None, None, True, False])
        y = self.check(
            self.model
            if again is None
            else lambda x: checkpoint(self.model, x, use_reentrant=again),
            x,
        )
        self.waiting.append((y, self.writes))

    def backward(self) -> None:
        if not self.waiting:
            return
        y, writes = self.waiting.pop(self.choice.randrange(len(self.waiting)))
        # a write since the forward may raise, as in plain PyTorch
        with contextlib.suppress(*[RuntimeError] * (writes != self.writes)):
            y.square().mean().backward(retain_graph=self.choice.random() < 0.2)

    def step(self) -> None:
        self.optimizer.step()
        if self.choice.random() < 0.7:
            self.optimizer.zero_grad()
        self.writes += 1

    def evaluate(self) -> None:
        with self.choice.choice([torch.no_grad, torch.inference_mode])():
            self.check(self.model, self.x())

    def view(self) -> None:
        (first, last), x = self.model, self.x()
        with torch.no_grad():
            hidden = F.linear(x, self.choice.choice([first.weight[:], first.weight.t().t()]))
            self.check(lambda _: in_a_layer(torch.matmul)(hidden, last.weight.t()), x)


@pytest.mark.usefixtures("group")
def test_no_forward_is_stale(device: torch.device) -> None:
    for seed in range(SEQUENCES):
        player = Player(seed, device)
        for _ in range(14):
            player.move()
