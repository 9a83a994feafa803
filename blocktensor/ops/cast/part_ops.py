"""Casts of a part of a matrix: of the rows that a rank holds of a sharded weight.

Blocks of the whole matrix may lie on several parts. So a cast takes two steps: the amax of each
part's share of the blocks, then, after a maximum over all parts, the data.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from .. import checks
from ..formats import BlockFormat, ceil_div, named
from ..runtime.specialize import Specialized, must_dispatch, recorded
from .choose_backend import cast_kernels


def part_amax(x: Tensor, format: BlockFormat, row: int, col: int) -> Tensor:
    """See :func:`blocktensor.ops.reference.part_amax`.

    Raises:
        TypeError, ValueError: ``x`` is not bf16, fp16 or fp32, or not a matrix or stack.
    """
    if must_dispatch(x):
        _check(x)
        return _amax_op(x, format.name, row, col)
    return _amax.find(x, format, row, col)(x, format, row, col)


def quantize_part(x: Tensor, amax: Tensor, format: BlockFormat, row: int, col: int) -> Tensor:
    """See :func:`blocktensor.ops.reference.quantize_part`.

    Raises:
        TypeError, ValueError: as :func:`part_amax`.
    """
    if must_dispatch(x):
        _check(x)
        return _quantize_op(x, amax, format.name, row, col)
    return _quantize.find(x, amax, format, row, col)(x, amax, format, row, col)


def _check(x: Tensor) -> None:
    checks.high_precision(x, "the part to quantize")
    checks.rank(x, (2, 3), "the part to quantize", "parts are of weights [N, K] or [E, N, K]")


def _key(*args: Tensor | BlockFormat | int) -> Hashable:
    return tuple(
        (x.shape, x.stride(), x.dtype, x.data_ptr() & 15, x.device) if isinstance(x, Tensor) else x
        for x in args
    )


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


_amax = Specialized(_decide_amax, _key)
_quantize = Specialized(_decide_quantize, _key)


@torch.library.custom_op("blocktensor::part_amax", mutates_args=())
def _amax_op(x: Tensor, format: str, row: int, col: int) -> Tensor:
    known = named(format)
    return _amax.find(x, known, row, col)(x, known, row, col)


@torch.library.custom_op("blocktensor::quantize_part", mutates_args=())
def _quantize_op(x: Tensor, amax: Tensor, format: str, row: int, col: int) -> Tensor:
    known = named(format)
    return _quantize.find(x, amax, known, row, col)(x, amax, known, row, col)


@_amax_op.register_fake
def _(x: Tensor, format: str, row: int, col: int) -> Tensor:
    rows, cols = named(format).block_shape
    blocks = ceil_div(row + x.shape[-2], rows), ceil_div(col + x.shape[-1], cols)
    return torch.empty((*x.shape[:-2], *blocks), dtype=torch.float32, device=x.device)


@_quantize_op.register_fake
def _(x: Tensor, amax: Tensor, format: str, row: int, col: int) -> Tensor:
    return torch.empty(x.shape, dtype=named(format).dtype, device=x.device)
