"""The error of a second backward: FP8 linears have no second derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


def raise_on_double_backward(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The same gradients, whose own backward raises NotImplementedError."""
    tracked = torch.zeros((), requires_grad=True)
    return tuple(None if g is None else _NoDoubleBackward.apply(g, tracked) for g in gradients)


class _NoDoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, result: Tensor, tracked: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "the second derivative of a blockwise FP8 linear is not implemented: compute that part "
            "of the model in high precision (convert(..., skip=[...]))"
        )
