"""Models for random programs of FSDP2: their blocks run in any order, and others act in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blocktensor.sharding.fsdp import fsdp_internals
from tests.support.moe_models import TitanMoE

K, HIDDEN, EXPERTS = 72, 150, 152  # ranks share rows unevenly, and blocks
BLOCKS = 3


def normed(x: Tensor) -> Tensor:
    """Keep programs of any length finite."""
    return F.layer_norm(x, (K,))


class Dense(nn.Module):
    """Two linears; one may be sharded by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(K, HIDDEN)
        self.down = nn.Linear(HIDDEN, K, bias=False)

    @property
    def inner(self) -> nn.Module:
        return self.up

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(normed(x)).relu()) + x


class Experts(TitanMoE):
    """A mixture of experts; the experts may be sharded by themselves."""

    def __init__(self) -> None:
        super().__init__(3, K, EXPERTS)

    @property
    def inner(self) -> nn.Module:
        return self.experts

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(normed(x)) + x


class Body(nn.Module):
    """Blocks of equal width, and a head in the root's group.

    Attributes:
        inside: is called with the place of each block that runs, before it, and of the head.
        checkpointed: True if blocks run again in backward.
    """

    def __init__(self, blocks: list[nn.Module], checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(K, K, bias=False)
        self.inside: Callable[[int], object] = lambda place: None
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for place, index in enumerate(order):
            self.inside(place)
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        self.inside(len(order))
        return self.head(normed(x))


# Writes to a sharded parameter


def rows_of(p: Any) -> Tensor:
    """Return the high-precision rows of a sharded parameter, converted or not."""
    local = p._local_tensor
    return getattr(local, "master", local).detach()


Write = Callable[[Any], Any]
COUNTED: dict[str, Write] = {
    "mul_": lambda p: p.mul_(1.7),
    "smaller": lambda p: p.mul_(0.6),
    "data.mul_": lambda p: p.data.mul_(2.9),
    "detach.mul_": lambda p: p.detach().mul_(-1.3),
    "lerp_": lambda p: p.lerp_(torch.full_like(p, 0.01), 0.5),
    "_foreach_mul_": lambda p: torch._foreach_mul_([p], 1.7),
    "to_local.mul_": lambda p: p.to_local().mul_(1.7),
    "to_local.data.mul_": lambda p: p.to_local().data.mul_(0.3),
    "rows": lambda p: p.to_local()[:3].mul_(2.9),
    "local copy_": lambda p: p.to_local().copy_(1.7 * p.to_local().detach()),
    "zero_": lambda p: p.zero_(),
}
UNCOUNTED: dict[str, Write] = {
    "to_local.view.data": lambda p: p.to_local().view(-1).data.mul_(2.9),
    "data of a view": lambda p: p.to_local().view(-1).data[-99:].mul_(7.1),
    "numpy": lambda p: rows_of(p).numpy().__imul__(1.7),
}


def write(p: Any, how: str) -> None:
    """Write to a parameter in one of the ways above, and keep its values in bounds."""
    (COUNTED | UNCOUNTED)[how](p)
    values = rows_of(p).data
    values.copy_(values.clamp(-2, 2))


# FSDP's own objects


def sharded_parameters(model: nn.Module) -> dict[str, Any]:
    """Return the sharded parameters by name, also of modules that are gathered now."""
    names = {module: name for name, module in model.named_modules()}
    found = {}
    for state in fsdp_internals._states():
        for owner, _ in fsdp_internals._params(state):
            info = owner._module_info
            if info.module in names:
                name = f"{names[info.module]}.{info.param_name}"
                found[name] = owner.sharded_param
    return found


def owners(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP's objects for the parameters of a model."""
    modules = {*model.modules()}
    for state in fsdp_internals._states():
        for owner, _ in fsdp_internals._params(state):
            if owner._module_info.module in modules:
                yield owner


def drop_gradients(model: nn.Module) -> None:
    """Drop gradients, those included that FSDP keeps for a later reduction."""
    for owner in owners(model):
        owner.sharded_param.grad = owner.unsharded_accumulated_grad = None
        if hasattr(owner, "_unsharded_param"):
            owner._unsharded_param.grad = None
