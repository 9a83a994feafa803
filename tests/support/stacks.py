"""Modules of experts as libraries leave them: with transformers' flags, fused, or unknown."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.models import FP8_TYPES
from tests.support.moe_models import GroupedExperts

E, N, K = 3, 256, 128


class Flagged(nn.Module):
    """Experts of a class that transformers' decorator has marked."""

    def __init__(self, is_transposed: bool = False, n: int = N, k: int = K) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = True, True, is_transposed
        up, down = (E, 2 * n, k), (E, k, n)
        shapes = [(e, b, a) if is_transposed else (e, a, b) for e, a, b in (up, down)]
        self.gate_up_proj = nn.Parameter(torch.ones(shapes[0]))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(E, 2 * n))
        self.down_proj = nn.Parameter(torch.ones(shapes[1]))


class Unknown(nn.Module):
    """Stacks that nothing tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(E, N, K))
        self.down = nn.Parameter(torch.ones(E, K, N))
        self.table = nn.Parameter(torch.ones(E, K))


class Fused(GroupedExperts):
    """torchtitan's override: two projections in one parameter of four dimensions."""

    def __init__(self) -> None:
        super().__init__(E, K, N)
        self.w13_EF2D = nn.Parameter(torch.ones(E, N, 2, K))
        self.extra = nn.Parameter(torch.ones(E, N, K))
        del self.w1_EFD, self.w3_EFD


def every_kind() -> nn.ModuleDict:
    """One module of each kind and orientation."""
    return nn.ModuleDict(
        {
            "titan": GroupedExperts(E, K, N),
            "flags": Flagged(),
            "transposed": Flagged(is_transposed=True, n=K),
            "small": Flagged(n=K, k=100),
            "fused": Fused(),
            "unknown": Unknown(),
            "named": Unknown(),
        }
    )


def fp8_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that are in FP8."""
    return [name for name, p in model.named_parameters() if isinstance(p, FP8_TYPES)]
