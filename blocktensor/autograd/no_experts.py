"""The grouped linear of a stack without matrices, as a rank has that got no experts.

Its gradients are zeros, not None: the ranks clip and step the same parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .check_operands import autocast_dtype


def is_of_no_experts(x: Tensor, w: Tensor, offs: Tensor) -> bool:
    """Whether ``x[T, K]`` meets a stack ``[0, N, K]``, and ``offs`` ends no group."""
    return (x.ndim, w.ndim, *w.shape[:1], *offs.shape) == (2, 3, 0, 0) and x.shape[1] == w.shape[2]


def of_no_experts(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Zeros ``[T, N]``: every row is of no group."""
    made: Tensor = _OfNoExperts.apply(autocast_dtype(x) or x.dtype, x, w, bias)
    return made


class _OfNoExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.inputs = [None if t is None else (t.shape, t.dtype, t.device) for t in (x, w, bias)]
        return torch.zeros(x.shape[0], w.shape[1], dtype=dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        def zeros(of: Any) -> Tensor | None:
            return None if of is None else torch.zeros(of[0], dtype=of[1], device=of[2])

        return None, *map(zeros, ctx.inputs)
