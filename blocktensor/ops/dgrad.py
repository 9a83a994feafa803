"""The data gradient as one op that makes the weight's columnwise form itself, for compilers.

A cast or transpose of the weight depends on no gradient. Seen as an op of its own, a compiler may
run it in the forward and save the result: a byte a parameter, until the backward is done with it.
Inside one op with the product there is nothing to save but what the model holds anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import library


def of_rowwise(
    g: Tensor, g_scale: Tensor, w: Tensor, w_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """``dx[M, K] = g[M, N] w[N, K]`` for the rowwise forms of both; 128x128 blocks in ``w``."""
    return _of_rowwise_op(g, g_scale, w, w_scale, out_dtype)


def of_master(
    g: Tensor, g_scale: Tensor, w: Tensor, power_of_two: bool, out_dtype: torch.dtype
) -> Tensor:
    """:func:`of_rowwise` for a high-precision ``w[N, K]``, which it casts; any strides."""
    return _of_master_op(g, g_scale, w, power_of_two, out_dtype)


@torch.library.custom_op("blocktensor::dgrad_of_rowwise", mutates_args=())
def _of_rowwise_op(
    g: Tensor, g_scale: Tensor, w: Tensor, w_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    columnwise = library.transpose_square(w, w_scale)
    return library.product(g, g_scale, *columnwise, None, out_dtype)


@torch.library.custom_op("blocktensor::dgrad_of_master", mutates_args=())
def _of_master_op(
    g: Tensor, g_scale: Tensor, w: Tensor, power_of_two: bool, out_dtype: torch.dtype
) -> Tensor:
    columnwise = library.transpose_square(*library.quantize_square(w, power_of_two))
    return library.product(g, g_scale, *columnwise, None, out_dtype)


@_of_rowwise_op.register_fake
def _(g: Tensor, g_scale: Tensor, w: Tensor, w_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.empty((g.shape[0], w.shape[1]), dtype=out_dtype, device=g.device)


@_of_master_op.register_fake
def _(g: Tensor, g_scale: Tensor, w: Tensor, power_of_two: bool, out_dtype: torch.dtype) -> Tensor:
    return torch.empty((g.shape[0], w.shape[1]), dtype=out_dtype, device=g.device)


@register_flop_formula(
    [torch.ops.blocktensor.dgrad_of_rowwise, torch.ops.blocktensor.dgrad_of_master]
)
def _flops(g_shape: Any, g_scale: Any, w_shape: Any, *_: Any, **__: Any) -> int:
    return 2 * g_shape[0] * w_shape[0] * w_shape[1]
