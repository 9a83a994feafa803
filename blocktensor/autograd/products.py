"""The three products of a linear on FP8 forms; a small linear records each direction as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.cast.ops import quantize_both, transpose
from ..ops.formats import BlockFormat, Quantized
from ..ops.gemm.ops import gemm
from ..tensor.fp8_tensor import quantize_forms


def fprop(
    x: Tensor,
    w: Quantized,
    bias: Tensor | None,
    format: BlockFormat,
    out_dtype: torch.dtype,
    columnwise: bool,
) -> tuple[Tensor, Quantized | None]:
    """``y[M, N] = x[M, K] wᵀ (+ bias)`` and, if asked for, the columnwise form of x.

    Args:
        x: high precision, cast to ``format`` here, or a BlockwiseFP8Tensor.
        w: the rowwise form of w.
        bias: ``[N]`` or None.
        format: of x.
        out_dtype: of y.
        columnwise: whether wgrad will need x.
    """
    x_row, x_col = quantize_forms(x, format, True, columnwise)
    assert x_row is not None
    return gemm(x_row, w, bias, out_dtype), x_col


def dgrad_and_wgrad(
    grad: Tensor, x: Quantized, w: Quantized, x_dtype: torch.dtype, w_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``dx[M, K] = grad w`` and ``dw[N, K] = gradᵀ x`` of the output's gradient ``grad[M, N]``.

    Args:
        grad: high precision, cast to the format of x here.
        x: the columnwise form of x.
        w: the rowwise form of w, in square blocks.
        x_dtype, w_dtype: of the results.
    """
    g_row, g_col = quantize_both(grad, x.format)
    dx = gemm(g_row, transpose(w), None, x_dtype)
    return dx, gemm(g_col, x, None, w_dtype)
