"""A model in every arrangement of parallelism: FSDP2, HSDP, tensor and expert parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import Recipe, convert, freeze
from blocktensor.distributed import ColwiseParallel, RowwiseParallel
from tests.support.expert_parallel import ExpertParallel
from tests.support.models import randn
from tests.support.moe_models import GroupedExperts
from tests.support.ranks import shared_mesh


class Net(nn.Module):
    """Linears, experts, a norm and a head that is the embedding, of sizes that no cut divides."""

    def __init__(self, aligned: bool) -> None:
        super().__init__()
        wide = 512 if aligned else 200
        self.embed = nn.Embedding(130, 300)
        self.up = nn.Linear(300, wide)
        self.down = nn.Linear(wide, 260, bias=False)
        self.experts = GroupedExperts(5, 128, 256)
        self.norm = nn.LayerNorm(300)
        self.head = nn.Linear(300, 130, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))


def net(
    device: str,
    dtype: torch.dtype,
    recipe: Recipe,
    frozen: bool,
    seed: int = 0,
    aligned: bool = False,
) -> Net:
    made = Net(frozen or aligned).to(dtype)
    for i, parameter in enumerate(made.parameters(), 100 * seed):
        parameter.data.copy_(randn(*parameter.shape, seed=i, dtype=torch.float32))
    convert(made, recipe, skip_small=False)
    if frozen:
        freeze(made)
    return made.to(device)


def fsdp(model: nn.Module, mesh: Any) -> None:
    for part in (model.up, model.experts):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module, mesh: Any) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def expert_parallel(model: nn.Module, mesh: Any) -> None:
    parallelize_module(model, mesh, {"experts": ExpertParallel()})


def both(model: nn.Module, mesh: Any) -> None:
    tensor_parallel(model, mesh)
    expert_parallel(model, mesh)


def over(model: nn.Module, square: Any, cut: Callable[[nn.Module, Any], None]) -> None:
    cut(model, square["b"])
    fsdp(model, square["a"])


Arrange = Callable[[nn.Module, Any, Any], object]
"""Cuts a model by a mesh of one dimension, and by one of two, or None."""

ARRANGEMENTS: dict[str, tuple[Arrange, bool]] = {
    "FSDP": (lambda m, line, square: fsdp(m, line), False),
    "TP": (lambda m, line, square: tensor_parallel(m, line), False),
    "EP": (lambda m, line, square: expert_parallel(m, line), False),
    "TP and EP": (lambda m, line, square: both(m, line), False),
    "HSDP": (lambda m, line, square: fsdp(m, square), True),
    "FSDP over TP": (lambda m, line, square: over(m, square, tensor_parallel), True),
    "FSDP over EP": (lambda m, line, square: over(m, square, expert_parallel), True),
    "FSDP over TP and EP": (lambda m, line, square: over(m, square, both), True),
}
"""How a model is sharded, and whether it takes a mesh of two dimensions."""


def arrange(model: nn.Module, how: str, world: int, device: str) -> bool:
    """Shard a model in one of ARRANGEMENTS; False if that takes another number of ranks."""
    cut, takes_square = ARRANGEMENTS[how]
    if takes_square and world != 4:
        return False
    line = shared_mesh(device, world, names=("all",))
    cut(model, line, shared_mesh(device, 2, 2, names=("a", "b")) if takes_square else None)
    return True


def same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Names, order, dtypes, shapes and bytes agree."""
    assert list(got) == list(want)
    for name, x in want.items():
        assert (got[name].dtype, got[name].shape) == (x.dtype, x.shape), name
        assert got[name].is_contiguous(), name
        bits = [t.cpu().contiguous().view(-1).view(torch.uint8) for t in (got[name], x)]
        assert torch.equal(*bits), name
