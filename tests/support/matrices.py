"""Models with matrices and stacks of every kind that a conversion tells apart."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.models import DIM, FP8_TYPES, Conv1D
from tests.support.moe_models import GroupedExperts


class Experts(nn.Module):
    """The experts of a mixture in stacks, and a router that the module holds directly."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 2 * DIM, DIM))
        self.down_proj = nn.Parameter(torch.zeros(4, DIM, DIM))
        self.router = nn.Parameter(torch.zeros(4, DIM))
        self.scale = nn.Parameter(torch.zeros(DIM))


def every_matrix() -> nn.Module:
    """Matrices of all kinds, some of them tied."""
    layers = [nn.ModuleDict({"fc1": nn.Linear(DIM, DIM), "experts": Experts()}) for _ in range(2)]
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(50, DIM),
            "same": nn.Embedding(50, DIM),
            "bag": nn.EmbeddingBag(10, DIM),
            "layers": nn.ModuleList(layers),
            "attention": nn.MultiheadAttention(DIM, 2),
            "conv1d": Conv1D(3 * DIM, DIM),
            "conv": nn.Conv2d(3, DIM, 4),
            "mixed": type("Mixed", (nn.Linear,), {})(DIM, DIM),
            "norm": nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM)),
            "tied": nn.Linear(DIM, DIM),
            "rnn": nn.LSTM(DIM, DIM),
            "lazy": nn.LazyConv2d(DIM, 4),
            "wide": nn.Linear(DIM, DIM, dtype=torch.float64),
            "lm_head": nn.Linear(DIM, 50, bias=False),
            "alias": nn.Module(),
        }
    )
    model["same"].weight = model["lm_head"].weight = model["embed"].weight
    model["mixed"].lora_a = nn.Parameter(torch.zeros(4, DIM))
    model["alias"].positions = nn.Parameter(torch.zeros(1, 5, DIM))
    model["alias"].of_tied = model["tied"].weight = model["mixed"].weight
    return model


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


def every_stack() -> nn.ModuleDict:
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
