"""dgrad as one op that includes the cast or transpose of the weight, for torch.compile.

A cast or transpose of the weight does not depend on the gradient. A compiler may run it, as a
separate op, in the forward and save the result, 1 byte a parameter, until the backward. One op with
the product saves only tensors that the model holds anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..cast.ops import quantize_transpose, transpose
from ..formats import BlockFormat, Quantized, named
from .ops import gemm, operands_of


def dgrad_of_rowwise(g: Quantized, w: Quantized, out_dtype: torch.dtype) -> Tensor:
    """``dx[M, K] = g[M, N] w[N, K]`` for the rowwise forms of both; square blocks in ``w``."""
    operands = g.data, g.scale, g.format.name, w.data, w.scale, w.format.name
    return _of_rowwise_op(*operands, out_dtype)


def dgrad_of_master(g: Quantized, w: Tensor, format: BlockFormat, out_dtype: torch.dtype) -> Tensor:
    """:func:`dgrad_of_rowwise` for a high-precision ``w[N, K]``, which it casts; any strides."""
    return _of_master_op(g.data, g.scale, g.format.name, w, format.name, out_dtype)


def _of_rowwise_body(*args: Any) -> Tensor:
    *operands, out_dtype = args
    g, w = operands_of(*operands)
    return gemm(g, transpose(w), None, out_dtype)


_of_rowwise_op = torch.library.custom_op(
    "blocktensor::dgrad_of_rowwise",
    _of_rowwise_body,
    mutates_args=(),
    schema="(Tensor g, Tensor g_scale, str g_format, Tensor w, Tensor w_scale, str w_format, "
    "ScalarType out_dtype) -> Tensor",
)


@torch.library.custom_op("blocktensor::dgrad_of_master", mutates_args=())
def _of_master_op(
    g: Tensor, g_scale: Tensor, g_format: str, w: Tensor, w_format: str, out_dtype: torch.dtype
) -> Tensor:
    w_col = quantize_transpose(w, named(w_format))
    return gemm(Quantized(g, g_scale, named(g_format)), w_col, None, out_dtype)


@_of_rowwise_op.register_fake
@_of_master_op.register_fake
def _(*args: Any) -> Tensor:
    g, _, _, w, *_, out_dtype = args
    return torch.empty((g.shape[0], w.shape[1]), dtype=out_dtype, device=g.device)


@register_flop_formula(
    [torch.ops.blocktensor.dgrad_of_rowwise, torch.ops.blocktensor.dgrad_of_master]
)
def _flops(g_shape: Any, g_scale: Any, _: str, w_shape: Any, *__: Any, **___: Any) -> int:
    return 2 * g_shape[0] * w_shape[0] * w_shape[1]
