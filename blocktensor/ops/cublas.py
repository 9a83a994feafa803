"""cuBLAS's blockwise GEMM through ``torch.nn.functional.scaled_mm`` (sm_90, CUDA >= 12.9)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .layouts import BLOCK, cublas_rowwise_scale, cublas_square_scale, rows_per_scale, vectorisable
from .prepared import Run


def gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See :func:`blocktensor.ops.reference.gemm`; shapes and bias as ``backends`` allows."""
    ready = vectorisable(a), a_scale, vectorisable(b), b_scale, bias, out_dtype
    return _prepare(*ready)(*ready)


def _prepare(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Run:
    # for data as layouts.vectorisable makes it
    a_kind, a_lay_out = _operand(a, a_scale)
    b_kind, b_lay_out = _operand(b, b_scale)

    def run(
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        # what torch.nn.functional.scaled_mm calls, without its checks of enums and lists
        return torch._scaled_mm_v2(
            a,
            b.t(),
            [a_lay_out(a_scale)],
            [a_kind],
            [],
            [b_lay_out(b_scale)],
            [b_kind],
            [],
            bias,
            out_dtype,
        )

    return run


gemm.prepare = _prepare  # type: ignore[attr-defined]


def _operand(data: Tensor, scale: Tensor) -> tuple[int, Callable[[Tensor], Tensor]]:
    kinds = torch.nn.functional.ScalingType
    if rows_per_scale(data.shape[0], scale) == BLOCK:
        return kinds.BlockWise128x128.value, cublas_square_scale
    return kinds.BlockWise1x128.value, cublas_rowwise_scale
