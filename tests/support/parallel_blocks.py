"""A decoder block, whole and tensor parallel, and what a step of it computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from blocktensor import Recipe, convert
from blocktensor.distributed import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from blocktensor.recipe import DEFAULT_RECIPE
from tests.support.numeric import assert_same
from tests.support.parallel_linears import drawn, local

DIM, HEAD = 256, 64
UNALIGNED = {"kv": 128, "hidden": 384}
"""64 rows of k and v and 192 of gate and up on each of 2 ranks."""


class Attention(nn.Module):
    """Attention with grouped queries."""

    def __init__(self, kv: int) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, DIM, bias=True)
        self.k, self.v = (nn.Linear(DIM, kv, bias=False) for _ in range(2))
        self.o = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        made: Tensor = self.o(y.transpose(1, 2).flatten(-2))
        return made


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(DIM, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, DIM, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return made


class Block(nn.Module):
    """Attention, then SwiGLU."""

    def __init__(self, kv: int = 256, hidden: int = 512) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.mlp = Attention(kv), Mlp(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        made: Tensor = x + self.mlp(self.norm2(x))
        return made


def block(
    recipe: Recipe | None = DEFAULT_RECIPE, dtype: torch.dtype = torch.bfloat16, **sizes: int
) -> Block:
    """One of the same values on every rank, converted if there is a recipe."""
    torch.manual_seed(0)
    made = Block(**sizes).to(dtype)
    if recipe is not None:
        convert(made, recipe, skip_small=False)
    return made


def parallelize(model: nn.Module, mesh: DeviceMesh, sequence: bool = True, **options: Any) -> None:
    """Make every :class:`Block` of a model tensor parallel; with ``sequence``, cut tokens too."""
    tokens = Shard(1) if sequence else Replicate()
    options = {"in_rank_order": True, **options}
    norm = SequenceParallel(use_local_output=True)
    prepare = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate(), **options)
    for found in model.modules():
        if isinstance(found, Block):
            plan = {
                "attention": prepare,
                **{f"attention.{name}": ColwiseParallel(**options) for name in "qkv"},
                "attention.o": RowwiseParallel(output_layouts=tokens, **options),
                "mlp": prepare,
                **{f"mlp.{name}": ColwiseParallel(**options) for name in ("gate", "up")},
                "mlp.down": RowwiseParallel(output_layouts=tokens, **options),
            }
            parallelize_module(
                found, mesh, plan | ({"norm1": norm, "norm2": norm} if sequence else {})
            )


def tokens_of(mesh: DeviceMesh, x: Tensor, sequence: bool = True) -> Tensor:
    """This rank's tokens of ``x[batch, time, DIM]``."""
    if not sequence:
        return x
    return x.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()


def batch(seed: int, tokens: int = 256, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The same ``[2, tokens, DIM]`` on every rank."""
    return drawn((2, tokens, DIM), dtype, seed)


class Computed(NamedTuple):
    """The results of a step."""

    y: Tensor
    dx: Tensor
    grads: dict[str, Tensor]


def compute(model: nn.Module, x: Tensor, grad: Tensor) -> Computed:
    """A forward and a backward; gradients as parameters hold them."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(grad)
    assert x.grad is not None
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Computed(y.detach(), x.grad, grads)


def assert_alike(got: Computed, want: Computed) -> None:
    """The same bits; no gradient is zero throughout."""
    assert_same(got.y, want.y)
    assert_same(got.dx, want.dx)
    assert got.grads.keys() == want.grads.keys()
    for name, grad in got.grads.items():
        assert local(grad).any(), name
        assert_same(local(grad), local(want.grads[name]))
