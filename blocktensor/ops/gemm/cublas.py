"""Call cuBLAS's blockwise GEMM as ``torch.nn.functional.scaled_mm`` does (sm_90, CUDA >= 12.9)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import BlockFormat, Quantized
from ..scale_layouts import cublas_scale, in_vectors


def gemm(
    a: Quantized,
    b: Quantized,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> Tensor:
    """See :func:`blocktensor.ops.reference.gemm`; for problems that the registry accepts."""
    # the function that scaled_mm calls, without its checks of enums and lists
    return torch._scaled_mm_v2(
        in_vectors(a.data),
        in_vectors(b.data).t(),
        [cublas_scale(a)],
        [_scaling(a.format)],
        [],
        [cublas_scale(b)],
        [_scaling(b.format)],
        [],
        bias,
        out_dtype,
    )


def _scaling(format: BlockFormat) -> int:
    kinds = torch.nn.functional.ScalingType
    kind = kinds.BlockWise1x128 if format.rows == 1 else kinds.BlockWise128x128
    value: int = kind.value
    return value
