"""Allocate the operands and gradients of thin matmuls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..formats import ceil_div
from ..scale_layouts import VECTOR_BYTES

DIMENSIONS = "ecr"
"""Expert, column of the wide matrix, and rank."""


def empty_operand(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised ``[E, C, R]`` for ``w[E, C, r]``."""
    step = VECTOR_BYTES // dtype.itemsize
    shape = *w.shape[:2], ceil_div(w.shape[2], step) * step
    return torch.empty(shape, dtype=dtype, device=w.device)


def empty_gradient(
    wide: Tensor, offs: Tensor | None, rank: int, dtype: torch.dtype, order: str
) -> Tensor:
    """Return an uninitialised ``[E, C, rank]`` whose dimensions lie in memory in this order."""
    sizes = 1 if offs is None else offs.shape[0], wide.shape[1], rank
    places = [DIMENSIONS.index(name) for name in order]
    made = torch.empty([sizes[i] for i in places], dtype=dtype, device=wide.device)
    return made.permute([order.index(name) for name in DIMENSIONS])


def order_of(strides: Sequence[int]) -> str:
    """Return the order in memory of a tensor ``[E, C, r]`` with these strides."""
    return "".join(name for _, name in sorted(zip(strides, DIMENSIONS, strict=True))[::-1])
