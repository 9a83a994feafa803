"""A Llama block in plain modules: what whole-model benchmarks are about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blocktensor as bt

from .timing import Call

BATCH, TIME, LAYERS = 2, 4096, 4


def recipe_of(variant: str) -> bt.Recipe:
    """Return the recipe that the name of a variant spells, such as "fp8, wgrad_input=1x128"."""
    inputs: tuple[bt.recipe.WgradInput, ...] = "1x128", "high_precision"
    backwards: tuple[bt.recipe.Backward, ...] = "dequantized", "high_precision"
    return bt.Recipe(
        backward=next((x for x in backwards if f"backward={x}" in variant), "fp8"),
        cache_weight=False if "cache_weight=False" in variant else "backward",
        wgrad_input=next((x for x in inputs if f"wgrad_input={x}" in variant), "128x128"),
        scale=bt.Scales(activations="power_of_two" if "sent in fp8" in variant else "fp32"),
    )


@dataclass(frozen=True)
class Shape:
    """Sizes of a block; the defaults are Llama 8B's."""

    dim: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8

    @property
    def head_dim(self) -> int:
        """The features of a head."""
        return self.dim // self.heads


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x[batch, time, dim]``."""
        made: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return made


class Block(nn.Module):
    """Attention with grouped queries, and SwiGLU; no position embedding, which is no linear's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv = shape.kv_heads * shape.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        self.q = nn.Linear(shape.dim, shape.dim, bias=False)
        self.k = nn.Linear(shape.dim, kv, bias=False)
        self.v = nn.Linear(shape.dim, kv, bias=False)
        self.o = nn.Linear(shape.dim, shape.dim, bias=False)
        self.mlp = MLP(shape)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """``x[batch, time, dim]``."""
        h = self.attention_norm(x)
        q, k, v = self._heads(self.q(h)), self._heads(self.k(h)), self._heads(self.v(h))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed


def stack(shape: Shape, layers: int, device: torch.device | str) -> nn.Sequential:
    """``layers`` blocks in bf16, with equal values for one state of the generator."""
    with torch.device(device):
        return nn.Sequential(*(Block(shape) for _ in range(layers))).to(torch.bfloat16)


def inputs() -> tuple[Tensor, Tensor]:
    """An input that wants a gradient, and a gradient of the output, on the GPU."""
    x = torch.randn(BATCH, TIME, Shape().dim, device="cuda", dtype=torch.bfloat16)
    return x.requires_grad_(), torch.randn_like(x)


def step(
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    grad: Tensor,
    microbatches: int = 1,
) -> Call:
    """Forwards and backwards of one step."""

    def once() -> None:
        x.grad = None
        model.zero_grad()
        for _ in range(microbatches):
            run(x).backward(grad)

    return once


def modes_of(
    name: str, model: nn.Module, x: Tensor, grad: Tensor, fullgraph: bool
) -> dict[str, Call]:
    """Return the steps of a variant by mode."""
    calls = {"eager": step(model, model, x, grad)}
    if "shared" not in name:  # sharing is off while compiling
        compiled = torch.compile(model, fullgraph=fullgraph)
        calls["compiled"] = step(model, compiled, x, grad)
    return calls
