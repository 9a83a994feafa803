"""cuBLAS's blockwise GEMM through ``torch.nn.functional.scaled_mm`` (sm_90, CUDA >= 12.9)."""

from __future__ import annotations

import torch
from torch import Tensor

from .layouts import BLOCK, cublas_rowwise_scale, cublas_square_scale, rows_per_scale, vectorisable


def gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See :func:`blocktensor.ops.reference.gemm`; shapes and bias as ``backends`` allows."""
    a_scale, a_kind = _operand(a, a_scale)
    b_scale, b_kind = _operand(b, b_scale)
    a, b = vectorisable(a), vectorisable(b)
    return torch.nn.functional.scaled_mm(
        a, b.t(), a_scale, a_kind, b_scale, b_kind, bias=bias, output_dtype=out_dtype
    )


def _operand(data: Tensor, scale: Tensor) -> tuple[Tensor, torch.nn.functional.ScalingType]:
    kinds = torch.nn.functional.ScalingType
    if rows_per_scale(data.shape[0], scale) == BLOCK:
        return cublas_square_scale(scale), kinds.BlockWise128x128
    return cublas_rowwise_scale(scale), kinds.BlockWise1x128
