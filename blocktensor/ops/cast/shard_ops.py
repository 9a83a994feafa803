"""Casts of a shard: the part of a weight that one rank holds.

A block may lie in several shards, so a cast has two steps: the amax of each shard's share of the
blocks, then, after a maximum over all shards, the data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import checks
from ..formats import BlockFormat, ceil_div, named
from ..runtime.specialize import Specialized, recorded
from .choose_backend import cast_kernels


def shard_amax(x: Tensor, format: BlockFormat, row: int, col: int) -> Tensor:
    """See :func:`blocktensor.ops.reference.shard_amax`.

    Raises:
        TypeError, ValueError: ``x`` is not bf16, fp16 or fp32, or not a matrix or stack; blocks
            that are not square.
    """
    return _amax(x, format, row, col)


def quantize_shard(x: Tensor, amax: Tensor, format: BlockFormat, row: int, col: int) -> Tensor:
    """See :func:`blocktensor.ops.reference.quantize_shard`; raises as :func:`shard_amax`."""
    return _quantize(x, amax, format, row, col)


def _check(x: Tensor, format: BlockFormat) -> None:
    if not format.transposes:
        raise ValueError(f"shards are cast in square blocks, got format {format.name}")
    checks.castable(x, format)


def _decide_amax(x: Tensor, format: BlockFormat, *place: int) -> Callable[..., Tensor]:
    _check(x, format)
    kernels = cast_kernels(x, format)
    return recorded(kernels.shard_amax, kernels.launches)


def _decide_quantize(
    x: Tensor, amax: Tensor, format: BlockFormat, *place: int
) -> Callable[..., Tensor]:
    _check(x, format)
    kernels = cast_kernels(x, format)
    return recorded(kernels.quantize_shard, kernels.launches)


def _dispatch_amax(x: Tensor, format: BlockFormat, row: int, col: int) -> Tensor:
    _check(x, format)
    return _amax_op(x, format.name, row, col)


def _dispatch_quantize(x: Tensor, amax: Tensor, format: BlockFormat, row: int, col: int) -> Tensor:
    _check(x, format)
    return _quantize_op(x, amax, format.name, row, col)


_amax = Specialized(_decide_amax, _dispatch_amax)
_quantize = Specialized(_decide_quantize, _dispatch_quantize)


@torch.library.custom_op("blocktensor::shard_amax", mutates_args=())
def _amax_op(x: Tensor, format: str, row: int, col: int) -> Tensor:
    return _amax.run(x, named(format), row, col)


@torch.library.custom_op("blocktensor::quantize_shard", mutates_args=())
def _quantize_op(x: Tensor, amax: Tensor, format: str, row: int, col: int) -> Tensor:
    return _quantize.run(x, amax, named(format), row, col)


@_amax_op.register_fake
def _(x: Tensor, format: str, row: int, col: int) -> Tensor:
    rows, cols = named(format).block_shape
    blocks = ceil_div(row + x.shape[-2], rows), ceil_div(col + x.shape[-1], cols)
    return torch.empty((*x.shape[:-2], *blocks), dtype=torch.float32, device=x.device)


@_quantize_op.register_fake
def _(x: Tensor, amax: Tensor, format: str, row: int, col: int) -> Tensor:
    return torch.empty(x.shape, dtype=named(format).dtype, device=x.device)
