"""Modules of experts to fuse: their forwards are given the sizes of groups, or their ends."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from blocktensor import Recipe, convert
from blocktensor.ops.producers.activations import ActivationName
from tests.support.gated import EAGER
from tests.support.models import randn
from tests.support.steps import step

EXPERTS, ROWS, K, HIDDEN = 5, 270, 192, 160
COUNTS = (1, 0, 127, 100, 13)
"""Rows of each expert; the others are of no group."""


class Sizes(nn.Module):
    """Gated experts in bf16, as torchtitan writes them; subclasses differ from them."""

    NAMES: tuple[str, ...] = ("w1", "w3", "w2")

    def __init__(
        self,
        activation: ActivationName = "silu",
        experts: int = EXPERTS,
        hidden: int = HIDDEN,
        k: int = K,
    ) -> None:
        super().__init__()
        self.of_gate = EAGER[activation]
        shapes = ((experts, hidden, k), (experts, hidden, k), (experts, k, hidden))
        for seed, (name, shape) in enumerate(zip(self.NAMES, shapes, strict=True)):
            values = torch.empty(shape, dtype=torch.bfloat16)
            if values.device.type != "meta":
                values = randn(*shape, seed=seed, dtype=torch.bfloat16) / math.sqrt(shape[2])
            self.register_parameter(name, nn.Parameter(values))

    def hidden(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.of_gate(gate) * up

    def stacks(self) -> tuple[Any, Any, Any]:
        """The stacks of gate, up and down."""
        return self.w1, self.w3, self.w2

    def offs(self, groups: Tensor) -> Tensor:
        return groups.cumsum(0, dtype=torch.int32)

    def plain(self, stack: Any) -> Any:
        return stack

    def forward(self, x: Tensor, groups: Tensor) -> Any:
        offs = self.offs(groups)
        gate, up, down = map(self.plain, self.stacks())

        def by(x: Tensor, w: Any) -> Tensor:
            return torch._grouped_mm(x.bfloat16(), w.bfloat16().transpose(-2, -1), offs=offs)

        return by(self.hidden(by(x, gate), by(x, up)), down)


class Ends(Sizes):
    """Is given the ends of the groups."""

    def offs(self, groups: Tensor) -> Tensor:
        return groups.int()


def converted(model: nn.Module, recipe: Recipe | None = None) -> Any:
    stacks = {"*": model.NAMES} if isinstance(model, Sizes) else None
    convert(model, recipe, skip_small=False, stacks=stacks)
    return model


def groups_for(model: nn.Module) -> Tensor:
    """What the forward of such a module is given beside rows."""
    sizes = torch.tensor(COUNTS, dtype=torch.int32)
    return sizes.cumsum(0, dtype=torch.int32) if isinstance(model, Ends) else sizes


def results(model: nn.Module) -> list[Tensor | None]:
    """The output and the gradients of x and of all parameters, from scratch."""
    x = randn(ROWS, K, seed=5)
    x[sum(COUNTS) :] = float("nan")  # of no group
    return step(model, x, groups_for(model))
