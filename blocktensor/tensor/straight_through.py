"""High-precision values of FP8 tensors, whose gradient passes straight through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class Dequantize(torch.autograd.Function):
    """The values of the FP8 form of an activation or a weight."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Any, dtype: torch.dtype | None) -> Tensor:
        made: Tensor = x.values_in(dtype)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None  # autograd converts it to the dtype of x


class HighPrecision(torch.autograd.Function):
    """The master of a trainable weight."""

    @staticmethod
    def forward(ctx: FunctionCtx, weight: Any) -> Tensor:
        made: Tensor = weight.master.view_as(weight.master)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]
