"""A model with matrices of every kind that a conversion tells apart."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.conv1d import Conv1D
from tests.support.models import DIM


class Experts(nn.Module):
    """The experts of a mixture in stacks, and a router that the module holds directly."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 2 * DIM, DIM))
        self.down_proj = nn.Parameter(torch.zeros(4, DIM, DIM))
        self.router = nn.Parameter(torch.zeros(4, DIM))
        self.scale = nn.Parameter(torch.zeros(DIM))


def every_kind() -> nn.Module:
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
