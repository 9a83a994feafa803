"""Two linear layers that read one input, cast and gathered once for both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import Recipe, convert
from blocktensor.distributed import ColwiseParallel, PrepareModuleInput
from tests.support.parallel_linears import BF16, drawn

K = 256


class Siblings(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(K, n, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def siblings(
    mesh: DeviceMesh, n: int = 256, recipe: Recipe | None = None, skip: tuple[str, ...] = ()
) -> Siblings:
    made = Siblings(n).to(mesh.device_type, BF16)
    convert(made, recipe, skip=skip, skip_small=False)
    return made


def parallel(module: Siblings, mesh: DeviceMesh, tokens: Any = None, **options: Any) -> Siblings:
    """The module's linears cut; ``tokens``: the layout of its input, ``Shard(1)`` by default."""
    plan = {name: ColwiseParallel(**options) for name in ("first", "second")}
    parallelize_module(module, mesh, plan)
    style = PrepareModuleInput(
        input_layouts=tokens or Shard(1), desired_input_layouts=Replicate(), **options
    )
    parallelize_module(module, mesh, style)
    return module


def input_of(mesh: DeviceMesh) -> Tensor:
    return drawn((2, 128, K), BF16, 1).to(mesh.device_type).requires_grad_()
