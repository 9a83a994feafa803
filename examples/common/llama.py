"""A Llama-shaped decoder in plain torch modules, and weights that no number of ranks changes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

INIT_ELEMENTS = 1 << 20
"""About how many values come from one generator: a rank makes the runs of rows that it holds."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. ``vocab`` 256 means bytes."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    rope_base: float = 500_000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def flops_per_token(self, seq: int) -> float:
        """Return the FLOPs of forward and backward as torchtitan counts: no mask, no recomputation.

        Six a weight that multiplies (the embedding only looks up), and attention's two products.
        """
        kv = self.kv_heads * self.head_dim
        block = self.dim * (2 * self.dim + 2 * kv + 3 * self.hidden)
        weights = self.layers * block + self.vocab * self.dim
        return 6 * weights + 12 * self.layers * self.dim * seq


SHAPES = {
    # 128x128 blocks lie on several ranks even here
    "tiny": Shape(dim=128, layers=2, heads=4, kv_heads=2, hidden=384, vocab=256),
    "1b": Shape(dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192, vocab=128256),
    "8b": Shape(dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, vocab=128256),
}


def rope_tables(shape: Shape, seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[seq, head_dim / 2]`` in fp32.

    Made in every step: a buffer would have to survive the meta device and ``model.bfloat16()``.
    """
    half = shape.head_dim // 2
    frequency = shape.rope_base ** (-torch.arange(half, device=device).float() / half)
    angle = torch.outer(torch.arange(seq, device=device).float(), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x[batch, heads, time, head_dim]`` turned by position, in fp32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


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
    """Attention with grouped queries, then SwiGLU."""

    def __init__(self, shape: Shape, recompute: bool = False) -> None:
        super().__init__()
        self.head_dim, self.recompute = shape.head_dim, recompute
        kv = shape.kv_heads * shape.head_dim
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.q = nn.Linear(shape.dim, shape.dim, bias=False)
        self.k = nn.Linear(shape.dim, kv, bias=False)
        self.v = nn.Linear(shape.dim, kv, bias=False)
        self.o = nn.Linear(shape.dim, shape.dim, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.mlp = MLP(shape)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _layer(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = self._heads(self.q(h)), self._heads(self.k(h)), self._heads(self.v(h))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x[batch, time, dim]``; recomputed in backward if asked for."""
        if not self.recompute:
            return self._layer(x, cos, sin)
        # inside the module that FSDP wraps: its weights are gathered before they are used again;
        # nothing here is random
        again: Tensor = checkpoint(
            self._layer, x, cos, sin, use_reentrant=False, preserve_rng_state=False
        )
        return again


class Head(nn.Module):
    """Logits and their loss, in a module of its own: it is gathered and reduced on its own."""

    def __init__(self, shape: Shape, loss_chunk: int = 0) -> None:
        super().__init__()
        self.loss_chunk = loss_chunk
        self.fused_loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.lm_head = nn.Linear(shape.dim, shape.vocab, bias=False)

    def _loss_sum(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(x).float(), targets, reduction="sum")

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """``x[batch, time, dim]`` and ``targets[batch, time]``; the cross-entropy is fp32."""
        x, targets = self.norm(x).flatten(0, 1), targets.flatten()
        if self.fused_loss is not None:
            return self.fused_loss(x, self.lm_head.weight, targets)
        if not self.loss_chunk:
            return self._loss_sum(x, targets) / targets.numel()
        # a chunk's logits are made again in backward: never are all there at once
        total = torch.zeros((), device=x.device)
        for chunk, wanted in zip(
            x.split(self.loss_chunk), targets.split(self.loss_chunk), strict=True
        ):
            total = total + checkpoint(
                self._loss_sum, chunk, wanted, use_reentrant=False, preserve_rng_state=False
            )
        return total / targets.numel()


class Llama(nn.Module):
    """Tokens and the tokens that follow in, mean loss out."""

    def __init__(self, shape: Shape, *, recompute: bool = False, loss_chunk: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape, recompute) for _ in range(shape.layers))
        self.head = Head(shape, loss_chunk)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Both ``[batch, time]``."""
        x = self.embedding(tokens)
        cos, sin = rope_tables(self.shape, tokens.shape[1], tokens.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        loss: Tensor = self.head(x, targets)
        return loss


def seed_of(*parts: object) -> int:
    """A generator's seed from whatever it stands for, the same on every machine."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _std(name: str, shape: Shape) -> float:
    # as in gpt.py: the last matrix of either branch is smaller in deep models
    residual = 1 / math.sqrt(2 * shape.layers)
    if name.startswith("embedding."):
        return 0.02
    if name.endswith(".down.weight"):
        return residual / math.sqrt(shape.hidden)
    return (residual if name.endswith(".o.weight") else 1.0) / math.sqrt(shape.dim)


@torch.no_grad()
def initialise(model: Llama, seed: int) -> None:
    """Draw the weights of a sharded model, each rank its own rows, whatever the number of ranks.

    A run of rows comes from a generator seeded by (seed, parameter name, run), on the device that
    holds it: nothing is made in full and nothing is sent. A CPU and a GPU draw other weights.
    """
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        if parameter.ndim == 1:
            local.fill_(1.0)  # a norm's
            continue
        rows, columns = parameter.shape
        mesh = parameter.device_mesh
        # FSDP2 cuts rows as torch.chunk does
        first = min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)
        last = first + local.shape[0]
        drawn = torch.empty(local.shape, dtype=torch.float32, device=local.device)
        run = max(1, INIT_ELEMENTS // columns)
        generator = torch.Generator(local.device)
        for begin in range(first // run * run, last, run):
            end = min(begin + run, rows)
            generator.manual_seed(seed_of(seed, name, begin // run))
            values = torch.empty(end - begin, columns, device=local.device)
            values.normal_(std=_std(name, model.shape), generator=generator)
            low, high = max(begin, first), min(end, last)
            drawn[low - first : high - first] = values[low - begin : high - begin]
        local.copy_(drawn)
