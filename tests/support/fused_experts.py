"""Modules of experts to fuse: their forwards are given the sizes of groups, or their ends."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from blocktensor.fusion.experts import Experts
from blocktensor.fusion.fused_class import fused_modules
from tests.support.gated import EAGER
from tests.support.models import randn

EXPERTS, ROWS, K, HIDDEN = 5, 270, 192, 320
COUNTS = (1, 0, 127, 100, 13)
"""Rows of each expert; the others are of no group."""


class Sizes(nn.Module):
    """Gated experts in bf16, as torchtitan writes them; subclasses differ from them."""

    NAMES = ("w1", "w3", "w2")

    def __init__(
        self, activation: str = "silu", experts: int = EXPERTS, hidden: int = HIDDEN
    ) -> None:
        super().__init__()
        self.act_name = activation
        shapes = ((experts, hidden, K), (experts, hidden, K), (experts, K, hidden))
        for seed, (name, shape) in enumerate(zip(self.NAMES, shapes, strict=True)):
            values = torch.empty(shape, dtype=torch.bfloat16)
            if values.device.type != "meta":
                values = randn(*shape, seed=seed, dtype=torch.bfloat16) / math.sqrt(shape[2])
            self.register_parameter(name, nn.Parameter(values))

    def act(self, x: Tensor) -> Tensor:
        return EAGER[self.act_name](x)

    def hidden(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act(gate) * up

    def offs(self, groups: Tensor) -> Tensor:
        return groups.cumsum(0, dtype=torch.int32)

    def forward(self, x: Tensor, groups: Tensor) -> Any:
        offs = self.offs(groups)
        gate, up, down = (self._parameters[name] for name in self.NAMES)

        def by(x: Tensor, w: Any) -> Tensor:
            return torch._grouped_mm(x.bfloat16(), w.bfloat16().transpose(-2, -1), offs=offs)

        return by(self.hidden(by(x, gate), by(x, up)), down)


class Ends(Sizes):
    """Is given the ends of the groups."""

    def offs(self, groups: Tensor) -> Tensor:
        return groups


def groups_of(ends: bool = False) -> Tensor:
    """What the forward of :class:`Sizes` or :class:`Ends` is given."""
    sizes = torch.tensor(COUNTS, dtype=torch.int32)
    return sizes.cumsum(0, dtype=torch.int32) if ends else sizes


def results(
    model: nn.Module, groups: Tensor | None = None, run: Any = None, dtype: Any = torch.bfloat16
) -> list[Tensor | None]:
    """The output and the gradients of x and of all parameters, from scratch."""
    for p in model.parameters():
        p.grad = None
    x = randn(ROWS, K, seed=5, dtype=dtype)
    x[sum(COUNTS) :] = float("nan")  # of no group
    x.requires_grad_()
    y = (model if run is None else run)(x, groups_of() if groups is None else groups)
    y.backward(randn(*y.shape, seed=6, dtype=y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def fused_in(model: nn.Module) -> list[str]:
    """The names of its modules of experts that are fused."""
    return [name for name, _ in fused_modules(model, Experts)]
