"""The grouped dgrad as one op with the cast or transpose of the stack (ops/gemm/dgrad_ops.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..cast.ops import quantize_rowwise, transpose
from ..formats import BlockFormat, Quantized, named
from ..gemm.ops import operands_of
from .ops import grouped_gemm


def grouped_dgrad_of_rowwise(
    g: Quantized, w: Quantized, offs: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """``dx[T, K]``: the rows of group e of ``g[T, N]`` by ``w[e, N, K]``; rowwise forms of both."""
    operands = g.data, g.scale, g.format.name, w.data, w.scale, w.format.name
    return _of_rowwise_op(*operands, offs, out_dtype)


def grouped_dgrad_of_master(
    g: Quantized, w: Tensor, format: BlockFormat, offs: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """:func:`grouped_dgrad_of_rowwise` for a high-precision ``w``, which it casts; any strides."""
    return _of_master_op(g.data, g.scale, g.format.name, w, format.name, offs, out_dtype)


def _of_rowwise_body(*args: Any) -> Tensor:
    *operands, offs, out_dtype = args
    g, w = operands_of(*operands)
    return grouped_gemm(g, transpose(w), offs, None, out_dtype)


_of_rowwise_op = torch.library.custom_op(
    "blocktensor::grouped_dgrad_of_rowwise",
    _of_rowwise_body,
    mutates_args=(),
    schema="(Tensor g, Tensor g_scale, str g_format, Tensor w, Tensor w_scale, str w_format, "
    "Tensor offs, ScalarType out_dtype) -> Tensor",
)


@torch.library.custom_op("blocktensor::grouped_dgrad_of_master", mutates_args=())
def _of_master_op(
    g: Tensor,
    g_scale: Tensor,
    g_format: str,
    w: Tensor,
    w_format: str,
    offs: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    if w.stride(1) == 1:  # of a stack [E, K, N]: its transpose is cast as it lies
        columnwise = quantize_rowwise(w.transpose(1, 2), named(w_format))
    else:
        columnwise = transpose(quantize_rowwise(w, named(w_format)))
    return grouped_gemm(Quantized(g, g_scale, named(g_format)), columnwise, offs, None, out_dtype)


@_of_rowwise_op.register_fake
@_of_master_op.register_fake
def _(*args: Any) -> Tensor:
    g, _, _, w, *_, out_dtype = args
    return torch.empty((g.shape[0], w.shape[2]), dtype=out_dtype, device=g.device)


@register_flop_formula(
    [torch.ops.blocktensor.grouped_dgrad_of_rowwise, torch.ops.blocktensor.grouped_dgrad_of_master]
)
def _flops(g_shape: Any, g_scale: Any, _: str, w_shape: Any, *__: Any, **___: Any) -> int:
    return 2 * g_shape[0] * w_shape[1] * w_shape[2]
