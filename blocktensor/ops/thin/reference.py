"""Specify the thin matmuls of adapters in plain torch.

An adapter of a stack of experts has matrices of few columns for each expert: ``[E, C, r]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import group_ranges
from .layout import empty_gradient, empty_operand


def thin_operand(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``w[E, C, r]``, of any strides, contiguous in ``dtype`` as ``[E, C, R]``.

    R is r rounded up to whole 16-byte vectors. The columns that are added are zeros.
    """
    made = empty_operand(w, dtype).zero_()
    made[..., : w.shape[-1]] = w
    return made


def thin_rows(x: Tensor, thin: Tensor, offs: Tensor | None, scaling: float) -> Tensor:
    """Multiply the rows of group e of ``x[T, C]`` by ``scaling * thin[e, C, R]``.

    The result is ``[T, R]`` in the dtype of x. Each number is a sum in fp32, which is multiplied by
    ``scaling`` in fp32 and rounded once. Rows of no group are zeros.
    """
    made = x.new_zeros((x.shape[0], thin.shape[-1]))
    factor = torch.tensor(scaling, dtype=torch.float32, device=x.device)
    for e, (begin, end) in enumerate(group_ranges(offs, x.shape[0])):
        total = (x[begin:end].double() @ thin[e].double()).float()
        made[begin:end] = (total + 0.0) * factor  # a sum begins with +0: none is -0
    return made


def thin_products(
    wide: Tensor, thin: Tensor, offs: Tensor | None, rank: int, dtype: torch.dtype, order: str
) -> Tensor:
    """Contract ``wide[T, C]`` and the first ``rank`` columns of ``thin[T, R]`` over each group.

    The result is ``[E, C, rank]`` in ``dtype``: sums in fp32, rounded once. Rows of no group are
    not read. ``order``: the dimensions of the result from the slowest in memory to the fastest, as
    a permutation of ``"ecr"``.
    """
    made = empty_gradient(wide, offs, rank, dtype, order).zero_()
    for e, (begin, end) in enumerate(group_ranges(offs, wide.shape[0])):
        made[e] = wide[begin:end].double().t() @ thin[begin:end, :rank].double() + 0.0
    return made
