"""A tensor parallel MLP with a prepared input, of which compilers compute the bits of eager."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from blocktensor import Recipe, convert
from blocktensor.distributed import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from tests.support.parallel_blocks import DIM
from tests.support.parallel_linears import drawn


class Mlp(nn.Module):
    """A gated one, with one rounding between its products."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(DIM, 512, bias=False) for _ in range(2))
        self.down = nn.Linear(512, DIM, bias=True)
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, DIM)
        if self.breaks:
            torch._dynamo.graph_break()
        made: Tensor = self.down(self.gate(x).relu() * self.up(x))
        return made


class Block(nn.Module):
    """One, whose hooks are in the graph with it."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.mlp(x)
        return made


def mlp(
    mesh: DeviceMesh, sequence: bool, recipe: Recipe | None = None, skip: tuple[str, ...] = ()
) -> Block:
    """A parallel one."""
    torch.manual_seed(0)
    model = Mlp().bfloat16()
    convert(model, recipe, skip=list(skip), skip_small=False)
    tokens = Shard(0) if sequence else Replicate()
    plan = {
        "": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate()),
        "gate": ColwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=tokens),
    }
    return Block(parallelize_module(model, mesh, plan))


def rows(mesh: DeviceMesh, sequence: bool, seed: int, tokens: int = 256) -> Tensor:
    """This rank's tokens, ``[tokens, DIM]``."""
    x = drawn((tokens, DIM), torch.bfloat16, seed)
    return x.chunk(mesh.size())[mesh.get_local_rank()].contiguous() if sequence else x
