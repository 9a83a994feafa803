"""Random writes to shards, forwards, backwards, steps: every forward equals a fresh conversion's.

``BLOCKTENSOR_FUZZ=200 pytest tests/distributed/fsdp/test_shard_fuzz.py`` runs so many
sequences.
"""

from __future__ import annotations

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
from blocktensor.distributed import precompute_block_amax
from tests.support.models import linear, randn
from tests.support.ranks import on_ranks
from tests.support.sharded import mesh_of, whole

SEQUENCES = int(os.environ.get("BLOCKTENSOR_FUZZ", "20"))
WIDTHS = (64, 160, 64)

Write = Callable[[Any], Any]


def copied(p: Any) -> None:
    local = p.to_local()
    local.copy_(randn(*local.shape, seed=7 + dist.get_rank(), dtype=local.dtype, device=p.device))


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
    "local copy_": copied,
    "master": lambda p: p._local_tensor.master.mul_(2),
    "data of the master": lambda p: p._local_tensor.master.data.mul_(2),
    "numpy": lambda p: p._local_tensor.master.numpy().__imul__(2),
}


def writes_of(device: str) -> dict[str, Write]:
    found = ON_ALL_RANKS | ON_ANY_RANK
    return found if device == "cpu" else {k: w for k, w in found.items() if k != "numpy"}


class Player:
    """A sharded model, and the moves of one random sequence, the same on all ranks."""

    def __init__(self, seed: int, device: str, mesh: DeviceMesh) -> None:
        self.choice, self.device = random.Random(seed), device
        recipe = Recipe(scale=self.choice.choice(["fp32", "power_of_two"]))
        pairs = zip(WIDTHS[1:], WIDTHS, strict=False)
        layers = [linear(*s, dtype=torch.float32, device=device, recipe=recipe) for s in pairs]
        self.model, self.recipe = nn.Sequential(*layers), recipe
        stays = self.choice.random() < 0.3
        for layer in layers if self.choice.random() < 0.7 else []:
            fully_shard(layer, mesh=mesh, reshard_after_forward=not stays)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.loss: Tensor | None = None
        self.trace: list[str] = []

    def x(self) -> Tensor:
        seed = self.choice.randrange(1000)
        return randn(5, WIDTHS[0], seed=seed, dtype=torch.float32, device=self.device)

    def check(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        wanted = x.detach()
        with torch.no_grad():
            masters = [whole(p.detach()).clone() for p in self.sharded()]
        for master in masters:
            wanted = functional.linear(wanted, master, recipe=self.recipe)
        y = run(x)
        assert torch.equal(y, wanted), self.trace
        return y

    def sharded(self) -> list[Any]:
        return list(self.model.parameters())

    def reshard(self) -> None:
        """What FSDP keeps whole after a forward without a backward is not gathered anew."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def write(self) -> None:
        self.backward()
        self.reshard()
        name, parameter = self.choice.choice(list(writes_of(self.device))), self.sharded()
        which, alone = self.choice.randrange(2), self.choice.choice([None, None, 0, 1])
        self.trace.append(name)
        with torch.no_grad():
            if name in ON_ALL_RANKS or alone in (None, dist.get_rank()):
                writes_of(self.device)[name](parameter[which])
            values = parameter[which]._local_tensor.master.data
            values.copy_(values.nan_to_num(1, 1, 1).clamp(-4, 4))

    def forward(self) -> None:
        self.backward()
        self.reshard()
        again = self.choice.choice([None, None, False])
        x = self.x().requires_grad_()
        y = self.check(
            self.model if again is None
            else lambda x: checkpoint(self.model, x, use_reentrant=again), x
        )  # fmt: skip
        self.loss = y.square().mean()

    def backward(self) -> None:
        if self.loss is not None:
            self.loss.backward()
        self.loss = None

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.choice.random() < 0.3:
            precompute_block_amax(self.model)
            self.evaluate()

    def evaluate(self) -> None:
        self.backward()
        self.reshard()
        with torch.no_grad():
            self.check(self.model, self.x())

    def move(self) -> None:
        moves = {"write": 5, "forward": 3, "backward": 1, "step": 2, "evaluate": 2}
        name = self.choice.choices(list(moves), list(moves.values()))[0]
        self.trace.append(name)
        getattr(self, name)()


@on_ranks(2)
def test_no_forward_is_stale(world: int, device: str) -> None:
    mesh = mesh_of(world, device)
    for seed in range(SEQUENCES):
        player = Player(seed, device, mesh)
        player.evaluate()  # of the root, as FSDP2 asks
        for _ in range(10):
            player.move()


def test_there_are_many_kinds_of_writes() -> None:
    assert len(writes_of("cpu")) >= 25
