"""A stand-in for transformers' ``Conv1D``, which need not be installed."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """The linear of GPT-2, whose weight is ``[K, N]``; as transformers has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.nx = nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.size()[:-1], self.nf)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


Conv1D.__module__ = "transformers.pytorch_utils"
