"""Inputs whose elements differ in size, as in trained models; and normal ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TOKENS, N, K = 1024, 256, 512


def normal(rng: torch.Generator, *shape: int) -> Tensor:
    """Elements of one size."""
    return torch.randn(shape, generator=rng)


def lognormal(rng: torch.Generator, *shape: int) -> Tensor:
    """Sizes of tokens or of channels."""
    return (1.5 * normal(rng, *shape)).exp()


def some(rng: torch.Generator, count: int, of: int, factor: float) -> Tensor:
    """Ones, but ``factor`` in ``count`` places."""
    made = torch.ones(of)
    made[torch.randperm(of, generator=rng)[:count]] = factor
    return made


def swiglu(rng: torch.Generator, rows: int, cols: int) -> Tensor:
    """With spreads of tokens and of channels."""
    gate, up = normal(rng, rows, cols), normal(rng, rows, cols)
    spread = lognormal(rng, rows, 1) ** 0.5 * lognormal(rng, 1, cols) ** 0.5
    return torch.nn.functional.silu(gate * spread) * up * spread


def heavy_tails(rng: torch.Generator, rows: int, cols: int) -> Tensor:
    """Student's t with three degrees of freedom."""
    chi = sum(normal(rng, rows, cols).square() for _ in range(3))
    return normal(rng, rows, cols) / (chi / 3).sqrt()


KINDS: dict[str, Callable[[torch.Generator, int, int], Tensor]] = {
    "normal": normal,
    "tokens lognormal": lambda rng, m, k: normal(rng, m, k) * lognormal(rng, m, 1),
    "channels x100": lambda rng, m, k: normal(rng, m, k) * some(rng, 8, k, 100),
    "tokens x1000": lambda rng, m, k: normal(rng, m, k) * some(rng, 8, m, 1000)[:, None],
    "swiglu": swiglu,
    "heavy tails": heavy_tails,
}


def drawn(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Draw x ``[TOKENS, K]`` and the gradient ``[TOKENS, N]`` of this kind, and a normal weight."""
    rng = torch.Generator().manual_seed(0)
    draw = KINDS[kind]
    return draw(rng, TOKENS, K), draw(rng, TOKENS, N), normal(rng, N, K) / K**0.5
