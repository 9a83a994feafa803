"""Random writes, forwards, backwards, steps: every forward equals that of a fresh conversion.

``BLOCKTENSOR_FUZZ=2000 pytest tests/end_to_end/test_staleness_fuzz.py`` runs so many sequences.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, functional
from tests.support.models import linear, plain, randn
from tests.support.writes import COUNTED, SWAPS, UNCOUNTED, Write

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


def small(module: nn.Linear) -> None:
    """Keep repeated writes from overflowing, through a pointer that nothing counts."""
    values = module.state_dict()["weight"].data
    values.copy_(values.clamp(-4, 4))


class Player:
    """A model, and the moves of one random sequence."""

    def __init__(self, seed: int, device: torch.device, recipe: Recipe) -> None:
        self.choice, self.recipe = random.Random(seed), recipe
        pairs = zip(WIDTHS[1:], WIDTHS, strict=False)
        layers = [linear(*s, dtype=torch.float32, device=device, recipe=recipe) for s in pairs]
        self.layers = layers
        self.optimizer = self.choice.choice(OPTIMIZERS)([m.weight for m in layers])
        self.waiting: list[tuple[Tensor, int]] = []
        self.device, self.writes, self.seen = device, 0, Counter[str]()
        self.writable = [w for w in WRITES if device.type == "cpu" or w not in CPU_ONLY]

    def x(self) -> Tensor:
        seed = self.choice.randrange(1000)
        return randn(5, WIDTHS[0], seed=seed, dtype=torch.float32, device=self.device)

    def check(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        wanted = x.detach()
        for layer in self.layers:
            wanted = functional.linear(wanted, plain(layer.weight).clone(), recipe=self.recipe)
        y = run(x)
        assert torch.equal(y, wanted), self.seen
        return y

    def model(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def move(self) -> None:
        moves = {"write": 5, "forward": 4, "backward": 4, "step": 1, "evaluate": 2, "view": 1}
        name = self.choice.choices(list(moves), list(moves.values()))[0]
        self.seen[name] += 1
        getattr(self, name)()

    def write(self) -> None:
        name = self.choice.choice(self.writable)
        self.seen[name] += 1
        if name in SWAPS:
            self.waiting.clear()
        layer = self.choice.choice(self.layers)
        WRITES[name](layer)
        small(layer)
        self.writes += 1

    def forward(self) -> None:
        if len(self.waiting) == 4:
            self.waiting.pop(0)
        x = self.x().requires_grad_()
        again = self.choice.choice([None, None, True, False])
        y = self.check(
            self.model if again is None
            else lambda x: checkpoint(self.model, x, use_reentrant=again), x
        )  # fmt: skip
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
        (first, last), x = self.layers, self.x()
        with torch.no_grad():
            hidden = F.linear(x, self.choice.choice([first.weight[:], first.weight.t().t()]))
            self.check(lambda _: hidden @ last.weight.t(), x)


def play(seed: int, device: torch.device) -> None:
    recipe = Recipe(scale=random.Random(seed).choice(["fp32", "power_of_two"]))
    player = Player(seed, device, recipe)
    for _ in range(14):
        player.move()


@pytest.mark.usefixtures("group")
def test_no_forward_is_stale(device: torch.device) -> None:
    for seed in range(SEQUENCES):
        play(seed, device)


def test_there_are_many_kinds_of_writes() -> None:
    assert len(WRITES) >= 60
