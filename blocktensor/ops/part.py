"""Registered ops for parts of a matrix: what a rank does with its rows of a sharded weight.

The 128x128 blocks of the whole matrix cross the borders of its parts. So a cast takes two steps:
each part's share of the blocks' amax, then, once all have the maximum, its bytes.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from . import backends
from .layouts import num_blocks
from .library import _check_stack, _register, must_be_seen
from .prepared import Prepared, Run, prepare


def _kind(*args: Tensor | bool | int) -> Hashable:
    return tuple(
        (x.shape, x.stride(), x.dtype, x.data_ptr() & 15, x.device) if isinstance(x, Tensor) else x
        for x in args
    )


def _prepare_amax(x: Tensor, row: int, col: int) -> Run:
    _check_stack(x)
    return prepare(backends.part_module(x), "part_amax", x, row, col)


def _prepare_quantize(x: Tensor, amax: Tensor, power_of_two: bool, row: int, col: int) -> Run:
    _check_stack(x)
    return prepare(backends.part_module(x), "quantize_part", x, amax, power_of_two, row, col)


_amax = Prepared(_kind, _prepare_amax)
_quantize = Prepared(_kind, _prepare_quantize)
_amax_op = _register(_amax, "part_amax", "(Tensor x, int row, int col) -> Tensor")
_quantize_op = _register(
    _quantize,
    "quantize_part",
    "(Tensor x, Tensor amax, bool power_of_two, int row, int col) -> Tensor",
)


@_amax_op.register_fake
def _(x: Tensor, row: int, col: int) -> Tensor:
    blocks = num_blocks(row + x.shape[-2]), num_blocks(col + x.shape[-1])
    return torch.empty((*x.shape[:-2], *blocks), dtype=torch.float32, device=x.device)


@_quantize_op.register_fake
def _(x: Tensor, amax: Tensor, power_of_two: bool, row: int, col: int) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)


def part_amax(x: Tensor, row: int, col: int) -> Tensor:
    """See :func:`blocktensor.ops.reference.part_amax`.

    Raises:
        TypeError, ValueError: ``x`` is not bf16/fp16/fp32, or not a matrix or stack.
    """
    if must_be_seen(x):
        _check_stack(x)
        return _amax_op(x, row, col)
    return _amax(x, row, col)


def quantize_part(x: Tensor, amax: Tensor, power_of_two: bool, row: int, col: int) -> Tensor:
    """See :func:`blocktensor.ops.reference.quantize_part`.

    Raises:
        TypeError, ValueError: as :func:`part_amax`.
    """
    if must_be_seen(x):
        _check_stack(x)
        return _quantize_op(x, amax, power_of_two, row, col)
    return _quantize(x, amax, power_of_two, row, col)
