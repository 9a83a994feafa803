"""The data gradient as one op that makes the weight's columnwise form itself, for compilers.

A cast or transpose of the weight depends on no gradient. As an op of its own, a compiler may run it
in the forward and save the result: a byte a parameter, held until the backward has used it. Inside
one op with the product there is nothing to save but what the model holds anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..cast.ops import quantize_rowwise, transpose
from ..formats import BlockFormat, Quantized, named
from .ops import gemm


def dgrad_of_rowwise(g: Quantized, w: Quantized, out_dtype: torch.dtype) -> Tensor:
    """``dx[M, K] = g[M, N] w[N, K]`` for the rowwise forms of both; square blocks in ``w``."""
    operands = g.data, g.scale, g.format.name, w.data, w.scale, w.format.name
    return _of_rowwise_op(*operands, out_dtype)


def dgrad_of_master(g: Quantized, w: Tensor, format: BlockFormat, out_dtype: torch.dtype) -> Tensor:
    """:func:`dgrad_of_rowwise` for a high-precision ``w[N, K]``, which it casts; any strides."""
    return _of_master_op(g.data, g.scale, g.format.name, w, format.name, out_dtype)


@torch.library.custom_op("blocktensor::dgrad_of_rowwise", mutates_args=())
def _of_rowwise_op(
    g: Tensor,
    g_scale: Tensor,
    g_format: str,
    w: Tensor,
    w_scale: Tensor,
    w_format: str,
    out_dtype: torch.dtype,
) -> Tensor:
    columnwise = transpose(Quantized(w, w_scale, named(w_format)))
    return gemm(Quantized(g, g_scale, named(g_format)), columnwise, None, out_dtype)


@torch.library.custom_op("blocktensor::dgrad_of_master", mutates_args=())
def _of_master_op(
    g: Tensor, g_scale: Tensor, g_format: str, w: Tensor, w_format: str, out_dtype: torch.dtype
) -> Tensor:
    columnwise = transpose(quantize_rowwise(w, named(w_format)))
    return gemm(Quantized(g, g_scale, named(g_format)), columnwise, None, out_dtype)


@_of_rowwise_op.register_fake
def _(
    g: Tensor,
    g_scale: Tensor,
    g_format: str,
    w: Tensor,
    w_scale: Tensor,
    w_format: str,
    out_dtype: torch.dtype,
) -> Tensor:
    return torch.empty((g.shape[0], w.shape[1]), dtype=out_dtype, device=g.device)


@_of_master_op.register_fake
def _(
    g: Tensor, g_scale: Tensor, g_format: str, w: Tensor, w_format: str, out_dtype: torch.dtype
) -> Tensor:
    return torch.empty((g.shape[0], w.shape[1]), dtype=out_dtype, device=g.device)


@register_flop_formula(
    [torch.ops.blocktensor.dgrad_of_rowwise, torch.ops.blocktensor.dgrad_of_master]
)
def _flops(g_shape: Any, g_scale: Any, _: str, w_shape: Any, *__: Any, **___: Any) -> int:
    return 2 * g_shape[0] * w_shape[0] * w_shape[1]
