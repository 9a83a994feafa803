"""Gated MLPs of torch's own functions, to compare fused ones with; and their operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from blocktensor import BlockwiseFP8Tensor, BlockwiseFP8Weight, Recipe
from tests.support.models import FP32_SCALES, SQUARE, randn
from tests.support.steps import assert_bits as assert_bits

K, HIDDEN, N = 192, 320, 136

EAGER: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def unfused(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *biases: Tensor | None,
    activation: str = "silu",
) -> Tensor:
    """What ``functional.gated_mlp`` is to equal, by torch's own functions."""
    b_gate, b_up, b_down = biases or (None, None, None)
    h = EAGER[activation](F.linear(x, w_gate, b_gate)) * F.linear(x, w_up, b_up)
    return F.linear(h, w_down, b_down)


def weights(
    kind: str = "weight",
    recipe: Recipe = FP32_SCALES,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    frozen: tuple[int, ...] = (),
) -> list[Tensor]:
    """gate, up and down in FP8; ``frozen``: the places of those without gradients.

    ``kind``: "weight" or, of frozen ones, "tensor".
    """
    made: list[Tensor] = []
    for i, shape in enumerate(((HIDDEN, K), (HIDDEN, K), (N, HIDDEN))):
        values = randn(*shape, seed=i, dtype=dtype, device=device) / 14
        if i in frozen and kind == "tensor":
            made.append(BlockwiseFP8Tensor.from_values(values, SQUARE, recipe))
        else:
            made.append(nn.Parameter(BlockwiseFP8Weight(values, recipe), i not in frozen))
    return made


def biases(
    dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu", grad: bool = True
) -> list[Tensor]:
    """Those of gate, up and down."""
    return [
        randn(n, seed=9 + i, dtype=dtype, device=device, grad=grad)
        for i, n in enumerate((HIDDEN, HIDDEN, N))
    ]


def results(
    run: Callable[..., Tensor], x: Tensor, operands: list[Any], again: bool = False
) -> list[Tensor | None]:
    """The output, the gradients of x and of all operands; ``again``: x has another use."""
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    for t in operands:
        if t is not None:
            t.grad = None
    y = run(leaf * 1.5 if again else leaf, *operands)
    if y.requires_grad:
        y.backward(randn(*y.shape, seed=77, dtype=y.dtype, device=y.device))
    given = [leaf, *(t for t in operands if t is not None)]
    return [y.detach(), *(t.grad for t in given)]


class WeightShapes(TorchFunctionMode):
    """The shapes of the weights and stacks that products read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.linear, torch._grouped_mm):
            self.seen.add(tuple(args[1].shape))
        return func(*args, **(kwargs or {}))
