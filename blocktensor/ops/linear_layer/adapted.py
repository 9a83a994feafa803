"""Compute a direction of a linear layer of a frozen FP8 weight with one low-rank term.

::

    fprop   u  = s (x · aᵀ)      y  = x · wᵀ + u · bᵀ (+ bias)
    dgrad   v  = s (g · b)       dx = g · w + v · a
    wgrad   da = vᵀ · x          db = gᵀ · u

:func:`fprop` and :func:`backward` call the ops that each consists of. A compiled graph pays for
every op that it calls, so it calls :func:`adapted_fprop` and :func:`adapted_backward`, which run
the same functions. A single weight is a stack of one expert, without ``offs``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cast.choose_backend import cast_backend
from ..formats import BlockFormat, Quantized
from ..grouped_gemm.ops import grouped_gemm
from ..op import op
from ..runtime.specialize import recorded
from ..thin.layout import empty_gradient, empty_operand
from ..thin.ops import thin_operand, thin_products, thin_rows
from .ops import cast_rows


def fprop(
    x: Tensor,
    x_row: Quantized | None,
    w: Quantized,
    bias: Tensor | None,
    offs: Tensor | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
    format: BlockFormat,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y ``[M, N]``, u ``[M, R]``, and a ``[E, K, R]`` and b ``[E, N, R]`` in ``out_dtype``.

    Args:
        x: ``[M, K]``, in the dtype of y.
        x_row: its rowwise cast, if it is cast already.
        w: the rowwise cast of ``[E, N, K]``.
        bias: ``[E, N]``.
        offs: int32 ``[E]``, the ends of groups; None if one group has all rows.
        a: the transpose, ``[E, K, r]``.
        b: ``[E, N, r]``.
        scaling: of the term.
        format: of x rowwise.
        out_dtype: of y.
    """
    if x_row is None:
        x_row, _ = cast_rows(x, offs, format, None)
    assert x_row is not None
    thin_a, thin_b = (thin_operand(t, out_dtype) for t in (a, b))
    u = thin_rows(x, thin_a, offs, scaling)
    y = grouped_gemm(x_row, w, offs, bias, out_dtype, x.shape[0], u, thin_b)
    return y, u, thin_a, thin_b


def backward(
    grad: Tensor,
    x: Tensor | None,
    u: Tensor | None,
    w: Quantized | None,
    a: Tensor | None,
    b: Tensor,
    offs: Tensor | None,
    scaling: float,
    rank: int,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    a_order: str,
    b_order: str,
    format: BlockFormat,
    x_dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx if w and a are given, da ``[E, K, r]`` if x is, and db ``[E, N, r]`` if u is.

    Args:
        grad: of y.
        x, u: of forward.
        w: the columnwise cast, ``[E, K, N]``.
        a, b: in the dtype of y, as :func:`fprop` returns them.
        offs, scaling, format: as in :func:`fprop`.
        rank: of the term.
        a_dtype, b_dtype: of da and db.
        a_order, b_order: how da and db lie in memory (``thin/layout.py``).
        x_dtype: of dx.
    """
    dx = da = db = v = None
    if a is not None or x is not None:
        v = thin_rows(grad, b, offs, scaling)
    if w is not None:
        g_row, _ = cast_rows(grad, offs, format, None)
        assert g_row is not None
        dx = grouped_gemm(g_row, w, offs, None, x_dtype, grad.shape[0], v, a)
    if x is not None:
        assert v is not None
        da = thin_products(x, v, offs, rank, a_dtype, a_order)
    if u is not None:
        db = thin_products(grad, u, offs, rank, b_dtype, b_order)
    return dx, da, db


def _decide_fprop(x: Tensor, x_row: Quantized, *_: Any) -> Callable[..., Any]:
    return recorded(fprop, cast_backend(x, x_row.format).launches)


def _flops_of_fprop(x: Any, x_row: Any, w: Any, bias: Any, offs: Any, a: Any, *_: Any) -> int:
    (m, k), n, rank = x, w.data[1], a[-1]
    return 2 * m * (n * k + rank * (n + k))


@op(decide=_decide_fprop, formats=lambda *_: (Tensor,) * 4, flops=_flops_of_fprop)
def adapted_fprop(
    x: Tensor,
    x_row: Quantized,
    w: Quantized,
    bias: Tensor | None,
    offs: Tensor | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
    format: BlockFormat,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run :func:`fprop` of an input that is cast already."""
    thin_a, thin_b = (empty_operand(t, out_dtype) for t in (a, b))
    y = x.new_empty((x.shape[0], w.data.shape[1]), dtype=out_dtype)
    return y, x.new_empty((x.shape[0], thin_a.shape[2])), thin_a, thin_b


def _decide_backward(grad: Tensor, *others: Any) -> Callable[..., Any]:
    return recorded(backward, cast_backend(grad, others[12]).launches)


def _flops_of_backward(grad: Any, x: Any, u: Any, w: Any, *others: Any) -> int:
    (m, n), rank, flops = grad, others[4], 0
    if w is not None:
        k = w.data[1]
        flops += 2 * m * (n * k + rank * (n + k))
    if x is not None:
        flops += 2 * m * rank * (x[1] + (n if w is None else 0))
    if u is not None:
        flops += 2 * m * rank * n
    return flops


@op(
    decide=_decide_backward,
    formats=lambda grad, x, u, w, *_: tuple(None if t is None else Tensor for t in (w, x, u)),
    flops=_flops_of_backward,
)
def adapted_backward(
    grad: Tensor,
    x: Tensor | None,
    u: Tensor | None,
    w: Quantized | None,
    a: Tensor | None,
    b: Tensor,
    offs: Tensor | None,
    scaling: float,
    rank: int,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    a_order: str,
    b_order: str,
    format: BlockFormat,
    x_dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Run :func:`backward`."""
    dx = da = db = None
    if w is not None:
        dx = grad.new_empty((grad.shape[0], w.data.shape[1]), dtype=x_dtype)
    if x is not None:
        da = empty_gradient(x, offs, rank, a_dtype, a_order)
    if u is not None:
        db = empty_gradient(grad, offs, rank, b_dtype, b_order)
    return dx, da, db
