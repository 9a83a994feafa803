"""The differentiable cast of an activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..recipe import DEFAULT_RECIPE, Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor


def quantize(x: Tensor, recipe: Recipe = DEFAULT_RECIPE) -> BlockwiseFP8Tensor:
    """Cast an activation ``x[..., K]`` once, for several linears to share (q, k, v; gate, up).

    Both forms are made from one read. Differentiable: the gradient passes straight through.

    Args:
        x: bf16, fp16 or fp32, ``[..., K]``.
        recipe: must round scales as the recipe of the weights it will meet.

    Raises:
        TypeError, ValueError: another dtype, or a scalar.
    """
    if isinstance(x, BlockwiseFP8Tensor):
        return x
    return _Quantize.apply(x, recipe)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, recipe: Recipe) -> BlockwiseFP8Tensor:
        return BlockwiseFP8Tensor.cast(x, recipe.activation_format, recipe)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None
