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
from blocktensor.sharding.dtensor import own_part
from tests.support.expert_parallel import cut
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


def both(model: nn.Module, mesh: Any) -> None:
    tensor_parallel(model, mesh)
    cut(model.experts, mesh)


CUTS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "FSDP": fsdp,
    "TP": tensor_parallel,
    "EP": lambda model, mesh: cut(model.experts, mesh),
    "TP and EP": both,
}
ARRANGEMENTS = (*CUTS, "HSDP", *(f"FSDP over {kind}" for kind in ("TP", "EP", "TP and EP")))
"""The latter four over a mesh of two dimensions."""


def arrange(model: nn.Module, how: str, world: int, device: str) -> bool:
    """Shard a model in one of ARRANGEMENTS; False if that takes another number of ranks."""
    if how in CUTS:
        CUTS[how](model, shared_mesh(device, world, names=("all",)))
    elif world == 4:
        square = shared_mesh(device, 2, 2, names=("a", "b"))
        if how != "HSDP":
            CUTS[how.removeprefix("FSDP over ")](model, square["b"])
        fsdp(model, square if how == "HSDP" else square["a"])
    return how in CUTS or world == 4


def facts(model: nn.Module) -> dict[str, tuple[type, torch.dtype, Any]]:
    """Return the type, dtype and recipe of each FP8 weight or its part, which a load must keep."""
    local = {name: own_part(x) for name, x in model.named_parameters()}
    fp8 = {name: x for name, x in local.items() if hasattr(x, "recipe")}
    assert fp8
    return {name: (type(x), x.dtype, x.recipe) for name, x in fp8.items()}


def same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Names, order, dtypes, shapes and bytes agree."""
    assert list(got) == list(want)
    for name, x in want.items():
        assert (got[name].dtype, got[name].shape) == (x.dtype, x.shape), name
        assert got[name].is_contiguous(), name
        bits = [t.cpu().contiguous().view(-1).view(torch.uint8) for t in (got[name], x)]
        assert torch.equal(*bits), name
