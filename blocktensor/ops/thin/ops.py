"""Define the ops of thin matmuls: see ``reference.py`` of this folder.

The rows of a wide matrix belong to groups, one after the other, which end at ``offs`` ``[E]``
(int32, cumulative, on the device). Nothing here reads ``offs`` on the host. Without ``offs`` one
group has all rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..devices import lacks_triton
from ..op import op
from ..registry import Backend, first_choice
from . import reference
from .layout import DIMENSIONS, empty_gradient, empty_operand


def _triton() -> tuple[Any, ...]:
    from . import triton_thin

    return (triton_thin,)


KERNEL_DTYPES = (torch.bfloat16, torch.float16)
"""The dtypes of operands: tensor cores would round fp32 to 10 bits."""

THIN_BACKENDS: tuple[Backend[torch.device], ...] = (
    Backend("triton", _triton, lacks_triton),
    Backend("reference", lambda: (reference,), launches=False),
)
"""All backends, best first; the reference runs on any device."""


def _backend(x: Tensor, *_: object) -> Backend[torch.device]:
    return first_choice(THIN_BACKENDS, x.device, x.device).backend


def _check_operand(w: Tensor, dtype: torch.dtype) -> None:
    checks.fit(w.ndim == 3, dtype in KERNEL_DTYPES)


def _check_rows(x: Tensor, thin: Tensor, offs: Tensor | None, scaling: float) -> None:
    if offs is not None:
        checks.group_ends(offs, x, "x")
    checks.fit(
        x.ndim == 2,
        tuple(thin.shape[:2]) == (1 if offs is None else len(offs), *x.shape[1:]),
        thin.dtype == x.dtype in KERNEL_DTYPES,
        thin.device == x.device,
        thin.is_contiguous(),
    )


def _check_products(
    wide: Tensor, thin: Tensor, offs: Tensor | None, rank: int, dtype: torch.dtype, order: str
) -> None:
    if offs is not None:
        checks.group_ends(offs, wide, "the wide matrix")
    checks.fit(
        wide.ndim == thin.ndim == 2,
        wide.shape[0] == thin.shape[0],
        rank <= thin.shape[1],
        thin.dtype == wide.dtype in KERNEL_DTYPES,
        thin.device == wide.device,
        thin.is_contiguous(),
        sorted(order) == sorted(DIMENSIONS),
    )


@op(_backend, check=_check_operand)
def thin_operand(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``w[E, C, r]`` contiguous in ``dtype``, ``[E, C, R]``, padded with zeros."""
    return empty_operand(w, dtype)


@op(
    _backend,
    check=_check_rows,
    flops=lambda x, thin, offs, scaling: 2 * x[0] * x[1] * thin[2],
)
def thin_rows(x: Tensor, thin: Tensor, offs: Tensor | None, scaling: float) -> Tensor:
    """Multiply the rows of group e of ``x[T, C]`` by ``scaling * thin[e, C, R]``: ``[T, R]``."""
    return x.new_empty((x.shape[0], thin.shape[2]))


@op(
    _backend,
    check=_check_products,
    flops=lambda wide, thin, offs, rank, *_: 2 * wide[0] * wide[1] * rank,
)
def thin_products(
    wide: Tensor, thin: Tensor, offs: Tensor | None, rank: int, dtype: torch.dtype, order: str
) -> Tensor:
    """Contract ``wide[T, C]`` and ``thin[T, R]`` over each group into ``[E, C, rank]``."""
    return empty_gradient(wide, offs, rank, dtype, order)
