"""Define the ops that run a direction of a linear layer as one, for compiled graphs.

A compiled graph pays for every op that it calls. ``linear_fprop`` casts the weight and multiplies.
``linear_backward`` casts the gradient and the weight, and computes dgrad and wgrad. The results
have the bits of the ops that they consist of.

With ``offs``, rows belong to groups, and weights are stacks of experts: see
``../grouped_gemm/ops.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cast.choose_backend import cast_backend
from ..cast.ops import quantize_forms, quantize_grouped, quantize_rowwise, quantize_transpose
from ..formats import BlockFormat, Quantized
from ..gemm.ops import gemm
from ..grouped_gemm.ops import grouped_gemm, grouped_gemm_wgrad
from ..op import op
from ..runtime.specialize import recorded

LARGE_BYTES = 2**27
"""A backward that reads or makes a tensor of this size frees each intermediate after its use, at
the cost of host time, which is then a small part. A recorded one holds all of them until it
ends."""


def _decide_fprop(x: Quantized, w: Tensor, *others: Any) -> Callable[..., Tensor]:
    return recorded(_fprop, cast_backend(w, others[2]).launches)


def _fprop(
    x: Quantized,
    w: Tensor,
    bias: Tensor | None,
    offs: Tensor | None,
    weight_format: BlockFormat,
    out_dtype: torch.dtype,
    tokens: int,
    batch_invariant: bool,
) -> Tensor:
    w_row = quantize_rowwise(w, weight_format)
    if offs is None:
        return gemm(x, w_row, bias, out_dtype, batch_invariant)
    return grouped_gemm(x, w_row, offs, bias, out_dtype, tokens)


@op(
    decide=_decide_fprop,
    flops=lambda x, w, bias, offs, format, dtype, tokens, *_: 2 * tokens * w[-2] * w[-1],
)
def linear_fprop(
    x: Quantized,
    w: Tensor,
    bias: Tensor | None,
    offs: Tensor | None,
    weight_format: BlockFormat,
    out_dtype: torch.dtype,
    tokens: int,
    batch_invariant: bool,
) -> Tensor:
    """Cast ``w`` and return ``y[T, N] = x wᵀ (+ bias)``.

    Args:
        x: the rowwise cast of ``[T, K]``.
        w: ``[N, K]``, or ``[E, N, K]`` with ``offs``, in high precision.
        bias: ``[N]`` or ``[E, N]``.
        offs: int32 ``[E]``, the ends of groups.
        weight_format: of the weight.
        out_dtype: of y.
        tokens: T.
        batch_invariant: see :func:`~blocktensor.ops.gemm.ops.gemm`.
    """
    return x.data.new_empty((tokens, w.shape[-2]), dtype=out_dtype)


def cast_rows(
    x: Tensor, offs: Tensor | None, rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> tuple[Quantized | None, Quantized | None]:
    """Cast rows, or rows in groups that end at ``offs``; a form without a format is None."""
    if offs is None:
        return quantize_forms(x, rowwise, columnwise)
    return quantize_grouped(x, offs, rowwise, columnwise)


def _decide_backward(grad: Tensor, *others: Any) -> Callable[..., tuple[Tensor | None, ...]]:
    x, w, w_columnwise, _, format, *_ = others
    operands = [
        of for of in (x and x.data, w, w_columnwise and w_columnwise.data) if of is not None
    ]
    rows, n = _matrix(grad.shape)
    largest = max(rows * n, *(math.prod(of.shape) for of in operands)) * grad.itemsize
    launches = largest < LARGE_BYTES and cast_backend(grad, format).launches
    return recorded(_backward, launches)


def _backward(
    grad: Tensor,
    x: Quantized | None,
    w: Tensor | None,
    w_columnwise: Quantized | None,
    offs: Tensor | None,
    format: BlockFormat,
    weight_format: BlockFormat,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    w_is_transposed: bool,
) -> tuple[Tensor | None, Tensor | None]:
    needs_dx = w is not None or w_columnwise is not None
    formats = format if needs_dx else None, None if x is None else format
    rows = grad.shape[0] if grad.ndim else 0
    g_row, g_col = cast_rows(grad, offs, *formats)
    dx = dw = None
    if needs_dx:
        assert g_row is not None
        if w is not None:
            w_columnwise = quantize_transpose(w, weight_format)
        assert w_columnwise is not None
        if offs is None:
            dx = gemm(g_row, w_columnwise, None, x_dtype)
        else:
            dx = grouped_gemm(g_row, w_columnwise, offs, None, x_dtype, rows)
        del g_row, w_columnwise
    if x is not None:
        assert g_col is not None
        if offs is None:
            dw = gemm(g_col, x, None, w_dtype)
        elif w_is_transposed:
            dw = grouped_gemm_wgrad(x, g_col, offs, rows, w_dtype).transpose(1, 2)
        else:
            dw = grouped_gemm_wgrad(g_col, x, offs, rows, w_dtype)
    return dx, dw


def _backward_flops(grad: Any, x: Any, w: Any, w_columnwise: Any, *_: Any) -> int:
    rows, n = _matrix(grad)
    flops = 0
    if w is not None or w_columnwise is not None:
        flops += 2 * rows * n * (w[-1] if w is not None else w_columnwise.data[-2])
    if x is not None:
        flops += 2 * rows * n * x.data[0]
    return flops


def _matrix(shape: Any) -> tuple[int, int]:
    """Return the rows and columns of a tensor whose leading dimensions are flattened."""
    return math.prod(shape[:-1]), shape[-1]


@op(
    decide=_decide_backward,
    formats=lambda grad, x, w, w_columnwise, *_: (
        None if w is None and w_columnwise is None else Tensor,
        None if x is None else Tensor,
    ),
    flops=_backward_flops,
)
def linear_backward(
    grad: Tensor,
    x: Quantized | None,
    w: Tensor | None,
    w_columnwise: Quantized | None,
    offs: Tensor | None,
    format: BlockFormat,
    weight_format: BlockFormat,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    w_is_transposed: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return ``dx[T, K] = grad w`` and ``dw[N, K] = gradᵀ x``, each if its operand is given.

    Args:
        grad: ``[..., N]`` in high precision; ``[T, N]`` with ``offs``.
        x: the columnwise cast of ``[T, K]``; None without dw.
        w: the weight ``[N, K]`` or ``[E, N, K]`` in high precision, which is cast here.
        w_columnwise: the columnwise form of the weight instead. Without both, there is no dx.
        offs: int32 ``[E]``, the ends of groups.
        format: of grad.
        weight_format: of the weight.
        x_dtype: of dx.
        w_dtype: of dw.
        w_is_transposed: whether dw ``[E, N, K]`` lies in memory as ``[E, K, N]``.
    """
    rows, n = _matrix(grad.shape)
    dx = dw = None
    if w is not None:
        dx = grad.new_empty((rows, w.shape[-1]), dtype=x_dtype)
    elif w_columnwise is not None:
        dx = grad.new_empty((rows, w_columnwise.data.shape[-2]), dtype=x_dtype)
    if x is not None:
        k = x.data.shape[0]
        if offs is None:
            dw = grad.new_empty((n, k), dtype=w_dtype)
        elif w_is_transposed:
            dw = grad.new_empty((offs.shape[0], k, n), dtype=w_dtype).transpose(1, 2)
        else:
            dw = grad.new_empty((offs.shape[0], n, k), dtype=w_dtype)
    return dx, dw
