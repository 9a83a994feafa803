"""The linears that one rank of 8 holds of a Llama block: forward and backward, bf16 beside FP8.

Attention, norms and collectives are left out, as both have the same. The linears of 8B are so small
that their time is the host's, which CUDA graphs remove.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blocktensor as bt

from .llama import MLP, Shape, modes_of, recipe_of, step
from .timing import Call, by_mode
from .turns import measured_in_turns

RANKS, TOKENS = 8, 8192
MODELS = {"Llama 70B": Shape(8192, 28672, 64, 8), "Llama 8B": Shape(4096, 14336, 32, 8)}
VARIANTS = ("bf16", "fp8", "fp8, inputs shared", "fp8, fused", "fp8, fused, wgrad_input=1x128")
QUICK: dict[str, Any] = {"models": ("Llama 8B",), "tokens": 512, "rounds": 2}
"""The arguments of a smoke run."""


class Shard(nn.Module):
    """The linears of a block that a rank of ``RANKS`` holds, in the order of a block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        queries, kv = shape.dim // RANKS, shape.kv_heads * shape.head_dim // RANKS
        self.q = nn.Linear(shape.dim, queries, bias=False)
        self.k = nn.Linear(shape.dim, kv, bias=False)
        self.v = nn.Linear(shape.dim, kv, bias=False)
        self.o = nn.Linear(queries, shape.dim, bias=False)
        self.mlp = MLP(Shape(shape.dim, shape.hidden // RANKS))

    def forward(self, x: Tensor) -> Tensor:
        """``x[tokens, dim]``."""
        q, k, v = self.q(x), self.k(x), self.v(x)
        mixed = q + F.pad(k + v, (0, q.shape[-1] - k.shape[-1]))  # attention's place
        made: Tensor = self.mlp(self.o(mixed))
        return made


def variant(name: str, made: nn.Module) -> nn.Module:
    """Make ``made`` what the variant is; linears of every size in FP8."""
    if name != "bf16":
        bt.convert(made, recipe_of(name), skip_small=False)
    if "fused" in name:
        bt.fuse(made)
    if "shared" in name or "fused" in name:
        bt.share_inputs(made)
    return made


def calls(name: str, model: str, tokens: int) -> dict[str, Call]:
    """Return the steps of a variant: eager, compiled, and compiled to CUDA graphs."""
    torch.manual_seed(0)
    shape = MODELS[model]
    with torch.device("cuda"):
        made = variant(name, Shard(shape).to(torch.bfloat16))
        x = torch.randn(tokens, shape.dim, dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn_like(x)
    found = modes_of(name, made, x, grad, fullgraph=False)
    if "compiled" in found:
        graphs = torch.compile(made, mode="reduce-overhead")
        found["graphs"] = step(made, graphs, x, grad)
    return found


def measure(
    models: tuple[str, ...] = tuple(MODELS), tokens: int = TOKENS, rounds: int = 12
) -> Iterator[dict[str, Any]]:
    """One row a model and variant: milliseconds by mode, and the speed-ups over bf16."""
    for model in models:
        prepare = functools.partial(calls, model=model, tokens=tokens)
        ms, _ = measured_in_turns(VARIANTS, prepare, rounds)
        for name in VARIANTS:
            yield {"model": model, "variant": name, **by_mode(ms, name), "tokens": tokens}
