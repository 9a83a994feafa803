"""Random writes to shards, forwards, backwards, steps: every forward equals a fresh conversion's.

``BLOCKTENSOR_FUZZ=200 pytest tests/sharding/fsdp/test_shard_fuzz.py`` runs so many
sequences.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, functional
from tests.support.models import linear, randn
from tests.support.ranks import on_ranks
from tests.support.sharded import step, whole

SEQUENCES = int(os.environ.get("BLOCKTENSOR_FUZZ", "20"))
WIDTHS = (64, 160, 64)

Write = Callable[[Any], Any]


def other(x: Tensor) -> Tensor:
    return randn(*x.shape, seed=7 + dist.get_rank(), dtype=x.dtype, device=x.device)


ON_ALL_RANKS: dict[str, Write] = {
    "mul_": lambda p: p.mul_(2),
    "data.mul_": lambda p: p.data.mul_(2),
    "detach.mul_": lambda p: p.detach().mul_(2),
    "lerp_": lambda p: p.lerp_(torch.zeros_like(p), 0.5),
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(0.25),
    "clamp_": lambda p: p.clamp_(-0.01, 0.01),
    "_foreach_mul_": lambda p: torch._foreach_mul_([p], 2),
    "copy_": lambda p: p.copy_(-p.detach()),
    "normal_": lambda p: nn.init.normal_(p.to_local(), generator=None),
    "broadcast of the rows": lambda p: dist.broadcast(p.to_local().view(-1), 0),
    "all_reduce of the rows": lambda p: dist.all_reduce(p.to_local()),
    "all_reduce of the master": lambda p: dist.all_reduce(p._local_tensor.master.view(-1)),
}
ON_ANY_RANK: dict[str, Write] = {
    "to_local.mul_": lambda p: p.to_local().mul_(2),
    "to_local.data.mul_": lambda p: p.to_local().data.mul_(2),
    "to_local.view.data": lambda p: p.to_local().view(-1).data.mul_(2),
    "to_local.view.mul_": lambda p: p.to_local().view(-1).mul_(2),
    "detach.to_local.data": lambda p: p.detach().to_local().data.mul_(2),
    "data.to_local": lambda p: p.data.to_local().mul_(2),
    "rows": lambda p: p.to_local()[:3].zero_(),
    "data of rows": lambda p: p.to_local()[:3].data.fill_(1),
    "local copy_": lambda p: p.to_local().copy_(other(p.to_local())),
    "master": lambda p: p._local_tensor.master.mul_(2),
    "data of the master": lambda p: p._local_tensor.master.data.mul_(2),
    "numpy": lambda p: p._local_tensor.master.numpy().__imul__(2),
}
WRITES = ON_ALL_RANKS | ON_ANY_RANK
MOVES = {"write": 5, "forward": 3, "backward": 1, "step": 2, "evaluate": 2}


class Player:
    """A sharded model, and the moves of one random sequence, the same on all ranks."""

    def __init__(self, seed: int, device: str, mesh: DeviceMesh) -> None:
        self.choice, self.device = random.Random(seed), device
        self.recipe = Recipe(scale=self.choice.choice(["fp32", "power_of_two"]))
        options = {"dtype": torch.float32, "device": device, "recipe": self.recipe}
        layers = [linear(n, k, **options) for k, n in itertools.pairwise(WIDTHS)]
        self.model = nn.Sequential(*layers)
        stays = self.choice.random() < 0.3
        for layer in layers if self.choice.random() < 0.7 else []:
            fully_shard(layer, mesh=mesh, reshard_after_forward=not stays)
        fully_shard(self.model, mesh=mesh)
        self.sharded: list[Any] = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.sharded, lr=0.01)
        self.loss: Tensor | None = None
        self.trace: list[str] = []

    def evaluate(self, grad: bool = False, **checkpointed: Any) -> Tensor:
        """Run on an input; the output is that of the weights as they are now."""
        for module in self.model.modules():  # what FSDP keeps whole is not gathered anew
            if isinstance(module, FSDPModule):
                module.reshard()
        seed = self.choice.randrange(1000)
        x = wanted = randn(5, WIDTHS[0], seed=seed, dtype=torch.float32, device=self.device)
        for master in [whole(p) for p in self.sharded]:
            wanted = functional.linear(wanted, master, recipe=self.recipe)
        with torch.set_grad_enabled(grad):
            x.requires_grad_(grad)
            y = checkpoint(self.model, x, **checkpointed) if checkpointed else self.model(x)
        assert torch.equal(y, wanted), self.trace
        return y

    def write(self) -> None:
        name = self.choice.choice([x for x in WRITES if self.device == "cpu" or x != "numpy"])
        which, alone = self.choice.randrange(2), self.choice.choice([None, None, 0, 1])
        self.trace.append(name)
        with torch.no_grad():
            if name in ON_ALL_RANKS or alone in (None, dist.get_rank()):
                WRITES[name](self.sharded[which])
            values = self.sharded[which]._local_tensor.master.data
            values.copy_(values.nan_to_num(1, 1, 1).clamp(-4, 4))

    def forward(self) -> None:
        checkpointed = self.choice.choice([{}, {}, {"use_reentrant": False}])
        self.loss = self.evaluate(True, **checkpointed).square().mean()

    def backward(self) -> None:
        if self.loss is not None:
            self.loss.backward()
        self.loss = None

    def step(self) -> None:
        step(self.optimizer)

    def move(self) -> None:
        name = self.choice.choices(list(MOVES), list(MOVES.values()))[0]
        self.trace.append(name)
        self.backward()
        getattr(self, name)()


@on_ranks(2)
def test_no_forward_is_stale(mesh: DeviceMesh, device: str) -> None:
    for seed in range(SEQUENCES):
        player = Player(seed, device, mesh)
        player.evaluate()  # of the root, as FSDP2 asks
        for _ in range(10):
            player.move()
