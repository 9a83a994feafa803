"""A mixture of experts in plain torch: top-k routing, and experts as stacks of matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GroupedExperts(nn.Module):
    """SwiGLU experts in three stacks ``[E, out, in]``.

    ``blocktensor.convert`` knows torchtitan's class of this name, and so finds these stacks.
    """

    def __init__(self, dim: int, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k  # what blocktensor.explain reads: how many rows come of a token
        self.w1 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(experts, hidden, dim))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """``x[rows, dim]`` sorted by expert, whose rows end at ``offs[E]``; returns bf16."""

        def by(x: Tensor, w: Tensor) -> Tensor:
            # autocast has no rule for this product
            return F.grouped_mm(x.bfloat16(), w.bfloat16().transpose(-2, -1), offs=offs)

        return by(F.silu(by(x, self.w1)) * by(x, self.w3), self.w2)


class MoE(nn.Module):
    """Each token goes to the ``top_k`` experts of its highest scores.

    No size of a group is read on the host, so that a step never waits for the GPU. A bias that
    chooses but does not weigh keeps experts in use: in training it rises for those that get fewer
    tokens than the mean (DeepSeek-V3).
    """

    bias: Tensor
    numbers: Tensor

    def __init__(self, dim: int, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = GroupedExperts(dim, hidden, experts, top_k)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("numbers", torch.arange(experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x[..., dim]``; returns the same shape and dtype."""
        tokens = x.flatten(0, -2)
        weights, chosen = self._route(tokens)
        by_expert, order = chosen.flatten().sort(stable=True)
        offs = torch.searchsorted(by_expert, self.numbers, right=True, out_int32=True)
        if self.training:
            self._balance(offs)
        rows = tokens.bfloat16().index_select(0, order // self.top_k)
        y = self.experts(rows, offs).index_select(0, order.argsort())
        mixed = (y.unflatten(0, (-1, self.top_k)) * weights.unsqueeze(-1)).sum(1)
        return mixed.view_as(x).type_as(x)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of each token, both ``[tokens, top_k]``."""
        # In fp32: rounding would send tokens elsewhere.
        with torch.autocast(tokens.device.type, enabled=False):
            scores = self.router(tokens.float()).sigmoid()
        chosen = (scores + self.bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen

    @torch.no_grad()
    def _balance(self, offs: Tensor, rate: float = 1e-3) -> None:
        sizes = offs.diff(prepend=offs.new_zeros(1)).float()
        self.bias += rate * (sizes.mean() - sizes).sign()
