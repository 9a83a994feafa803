"""Casts of a part of a matrix: one rank's share of a sharded weight.

A block may lie in several parts, so a cast has two steps: the amax of each part's share of the
blocks, then, after a maximum over all parts, the data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import checks
from ..formats import BlockFormat, ceil_div, named
from ..runtime.specialize import Specialized, recorded
from .choose_backend import cast_kernels


def part_amax(x: Tensor, format: BlockFormat, row: int, col: int) -> Tensor:
    """See :func:`blocktensor.ops.reference.part_amax`.

    Raises:
        TypeError, ValueError: ``x`` is not bf16, fp16 or fp32, or not a matrix or stack.
    """
    return _amax(x, format, row, col)


def quantize_part(x: Tensor, amax: Tensor, format: BlockFormat, row: int, col: int) -> Tensor:
    """See :func:`blocktensor.ops.reference.quantize_part`; raises as :func:`part_amax`."""
    return _quantize(x, amax, format, row, col)


def _check(x: Tensor) -> None:
    checks.high_precision(x, "the part to quantize")
    checks.rank(x, (2, 3), "the part to quantize", "parts are of weights [N, K] or [E, N, K]")


def _decide_amax(x: Tensor, format: BlockFormat, *place: int) -> Callable[..., Tensor]:
    _check(x)
    kernels = cast_kernels(x, format)
    return recorded(kernels.part_amax, kernels.launches)


def _decide_quantize(
    x: Tensor, amax: Tensor, format: BlockFormat, *place: int
) -> Callable[..., Tensor]:
    _check(x)
    kernels = cast_kernels(x, format)
    return recorded(kernels.quantize_part, kernels.launches)


def _dispatch_amax(x: Tensor, format: BlockFormat, row: int, col: int) -> Tensor:
    _check(x)
    return _amax_op(x, format.name, row, col)


def _dispatch_quantize(x: Tensor, amax: Tensor, format: BlockFormat, row: int, col: int) -> Tensor:
    _check(x)
    return _quantize_op(x, amax, format.name, row, col)


_amax = Specialized(_decide_amax, _dispatch_amax)
_quantize = Specialized(_decide_quantize, _dispatch_quantize)


@torch.library.custom_op("blocktensor::part_amax", mutates_args=())
def _amax_op(x: Tensor, format: str, row: int, col: int) -> Tensor:
    return _amax.run(x, named(format), row, col)


@torch.library.custom_op("blocktensor::quantize_part", mutates_args=())
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
