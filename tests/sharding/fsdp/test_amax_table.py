"""The table of block amaxes: which weights have a place in it, what is kept."""

from __future__ import annotations

import gc
import io
import itertools
import os
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from blocktensor import Recipe, convert, functional
from blocktensor.sharding.fsdp import amax_table, fsdp_internals
from tests.support.models import POWER_OF_TWO, linear, randn
from tests.support.ranks import on_ranks
from tests.support.sharded import assert_equal, scale, step, whole
from tests.support.sharded_checkpoints import (
    assert_forward_is_fresh,
    converted,
    loss_of,
    sharded,
    table_of,
    train,
    trained,
)


def aliases(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@on_ranks(3, gpus=())
def test_shards_of_another_recipe_are_assigned_and_back(mesh: DeviceMesh) -> None:
    """They are gathered, and their inputs cast, by that recipe, whether that model has run."""
    model, _ = trained(mesh)
    source, _ = sharded(converted(seed=3, recipe=POWER_OF_TWO), mesh)
    states = {POWER_OF_TWO: aliases(source), Recipe(): aliases(model)}
    for recipe in (POWER_OF_TWO, Recipe(), POWER_OF_TWO, Recipe()):
        before = table_of(model, 0)
        model.load_state_dict(states[recipe], assign=True)
        for _ in range(2):
            assert_forward_is_fresh(model, converted(recipe=recipe))
            model.half().bfloat16()
        assert table_of(model, 0) is not before
        loss_of(source, 0)


@on_ranks(3, gpus=())
def test_shards_of_another_model_are_assigned(mesh: DeviceMesh) -> None:
    """They come without its table: each model counts its own forwards and changes."""
    (model, _), (source, _) = (trained(mesh) for _ in range(2))
    scale(4, source[2].weight)
    loss_of(source, 0)
    own, theirs = table_of(model, 0), table_of(source, 0)
    model.load_state_dict(aliases(source), assign=True)
    assert_forward_is_fresh(source)  # the rows that FSDP padded were read on some ranks alone
    assert_forward_is_fresh(model)
    assert table_of(model, 0) is own is not theirs
    assert table_of(source, 0) is theirs
    model.half().bfloat16()
    scale(16, model[2].weight)
    assert_forward_is_fresh(model)
    assert_forward_is_fresh(source)
    loss = loss_of(model, 0)
    scale(4, model[2].weight)
    with pytest.raises(RuntimeError, match="was changed or moved on this rank"):
        loss.backward()


@on_ranks(3, gpus=())
def test_two_models_share_parameters(mesh: DeviceMesh) -> None:
    """Each has them in a table of its own, though the shards are the same objects.

    Biases are not shared: FSDP gathers old values of what another model pads again.
    """
    (model, _), (source, _) = (trained(mesh) for _ in range(2))
    state = source.state_dict(keep_vars=True)
    del state["0.bias"]
    model.load_state_dict(state, strict=False, assign=True)
    assert model[0].weight is source[0].weight
    other, _ = sharded(converted(), mesh)  # which never runs
    other.load_state_dict(state, strict=False, assign=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(2):
        for trains in (model, source):
            train(trains, optimizer, number)
            for sharing in (model, source):
                assert_forward_is_fresh(sharing)
        model.load_state_dict({}, strict=False)
        assert_forward_is_fresh(source)


@on_ranks(2, gpus=())
def test_another_recipe_is_assigned_before_backward(mesh: DeviceMesh) -> None:
    """A backward that does not read this weight reads the others as its forward did."""
    model, other = converted(), converted(recipe=POWER_OF_TWO)
    for root in (model, other):  # backward gathers all weights at once
        fully_shard(root, mesh=mesh, reshard_after_forward=True)
    found = []
    for assigns in (False, True):
        model.zero_grad()
        loss = loss_of(model, 0)
        if assigns:
            model.load_state_dict({"0.weight": other[0].weight.detach()}, strict=False, assign=True)
        loss.backward()
        found.append([whole(p.grad) for name, p in model.named_parameters() if name != "0.weight"])
        loss_of(model, 0).backward()
    assert_equal(*found)


@on_ranks(2, gpus=())
def test_parameters_are_pickled_after_a_forward(mesh: DeviceMesh) -> None:
    model, _ = trained(mesh)
    file = io.BytesIO()
    torch.save(dict(model.named_parameters()), file)
    file.seek(0)
    assert_equal(torch.load(file, weights_only=False).values(), model.parameters())


@on_ranks(2, gpus=())
def test_two_weights_are_exchanged(mesh: DeviceMesh) -> None:
    def squares() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(192, 192, bias=False) for _ in range(2))).bfloat16()
        convert(model, skip_small=False)
        return model

    model, _ = sharded(squares(), mesh)
    loss_of(model, 0).backward()
    scale(8, model[0].weight)
    first, second = aliases(model).values()
    model.load_state_dict({"0.weight": second, "1.weight": first}, assign=True)
    assert_forward_is_fresh(model, squares())


@on_ranks(2, gpus=())
def test_tables_end_with_their_model(mesh: DeviceMesh) -> None:
    model, optimizer = trained(mesh)
    table = weakref.ref(table_of(model, 0))
    model.half().bfloat16()
    loss_of(model, 0)
    owners = [o for o, place in amax_table._PLACES.items() if place.table is table()]
    assert len(owners) == 3
    found = {key for key, (owner, _) in fsdp_internals._FOUND.items() if owner() in owners}
    assert len(found) == 3
    del model, optimizer, owners
    gc.collect()
    assert table() is None
    assert found.isdisjoint(fsdp_internals._FOUND)


# Random writes and steps: forwards are as converted anew (``BLOCKTENSOR_FUZZ=200``: so many runs)

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
