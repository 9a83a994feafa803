"""Casts, transposes and dequantize: the functions that the package calls, and their registered ops.

A registered op takes tens of microseconds a call in eager mode, so each function runs its decision
(``ops/runtime/specialize.py``) directly unless it must go through the dispatcher. Both ways run the
same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import checks
from ..formats import BlockFormat, Quantized, named
from ..runtime.specialize import Specialized, must_dispatch, recorded
from ..scale_layouts import VECTOR_BYTES, columnwise_width, empty_columnwise, empty_quantized
from .choose_backend import cast_kernels

Pair = tuple[Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def quantize_rowwise(x: Tensor, format: BlockFormat) -> Quantized:
    """Cast ``x[..., R, C]``; see :func:`blocktensor.ops.reference.quantize_rowwise`.

    Raises:
        TypeError, ValueError: ``x`` is not bf16, fp16 or fp32, or not a matrix (or, in square
            blocks, a stack of them).
    """
    return _rowwise(x, format)


def quantize_columnwise(x: Tensor, format: BlockFormat) -> Quantized:
    """Cast the transpose of ``x[M, K]``; see :func:`blocktensor.ops.reference.quantize_columnwise`.

    In square blocks, that is the transpose of the rowwise cast, and zeros.

    Raises:
        TypeError, ValueError: ``x`` is not bf16, fp16 or fp32, or not a matrix.
    """
    return _columnwise(x, format)


def quantize_both(
    x: Tensor, format: BlockFormat, columnwise_format: BlockFormat | None = None
) -> tuple[Quantized, Quantized]:
    """The rowwise and columnwise casts of ``x[M, K]`` from one read.

    Args:
        x: ``[M, K]`` bf16, fp16 or fp32.
        format: of the rowwise cast, not of square blocks.
        columnwise_format: of the columnwise cast; by default the same.

    Raises:
        TypeError, ValueError: as :func:`quantize_columnwise`; a format of square blocks, in which
            both casts would be one and its transpose.
    """
    return _both(x, format, columnwise_format or format)


def quantize_forms(
    x: Tensor, rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> tuple[Quantized | None, Quantized | None]:
    """Casts of an activation or gradient ``x[..., K]`` from one read, each in its format.

    None for a form without a format. Leading dimensions are flattened. Raises as
    :func:`quantize_both`, and for a scalar.
    """
    if x.ndim == 0:
        name = next(format.name for format in (rowwise, columnwise) if format is not None)
        raise ValueError(f"cannot quantize a scalar in {name} blocks: expected shape [..., K]")
    if x.ndim != 2:
        x = x.flatten(0, -2) if x.ndim > 2 else x.unsqueeze(0)
    if rowwise is not None and columnwise is not None:
        return _both(x, rowwise, columnwise)
    return (
        None if rowwise is None else _rowwise(x, rowwise),
        None if columnwise is None else _columnwise(x, columnwise),
    )


def transpose(x: Quantized) -> Quantized:
    """Exact transpose of a cast ``[..., N, K]``; ValueError unless its blocks are square."""
    return _transpose(x)


def quantize_transpose(x: Tensor, format: BlockFormat) -> Quantized:
    """Return ``transpose(quantize_rowwise(x, format))`` of ``x[..., M, K]``, in one pass if it can.

    A columnwise cast has those bytes if it needs no columns of zeros.

    Raises:
        TypeError, ValueError: as :func:`quantize_rowwise`; blocks that are not square.
    """
    _check_square(format)
    if must_dispatch(x):  # one op: compilers would merge a cast with one of the forward
        data, scale = _quantize_transpose_op(x, format.name)
        return Quantized(data, scale, format)
    return _quantize_transpose(x, format)


def _quantize_transpose(x: Tensor, format: BlockFormat) -> Quantized:
    if x.ndim >= 2 and x.stride(-2) == 1:
        return _rowwise(x.transpose(-1, -2), format)
    if x.ndim == 2 and columnwise_width(x.shape[0], format) == x.shape[0]:
        return _columnwise(x, format)
    return _transpose(_rowwise(x, format))


def quantize_with_transpose(x: Tensor, format: BlockFormat) -> tuple[Quantized, Quantized]:
    """The cast of ``x[..., N, K]`` and its transpose, from one read where it can.

    Raises:
        TypeError, ValueError: as :func:`quantize_rowwise`; blocks that are not square.
    """
    return _with_transpose(x, format)


def dequantize(x: Quantized, dtype: torch.dtype) -> Tensor:
    """``data * scale`` in ``dtype``; see :func:`blocktensor.ops.reference.dequantize`."""
    return _dequantize(x, dtype)


def _check_columnwise(x: Tensor, format: BlockFormat) -> None:
    checks.castable(x, format)
    checks.rank(x, (2,), "the tensor to quantize", "columnwise casts are those of a matrix [M, K]")


def _check_both(x: Tensor, format: BlockFormat, columnwise_format: BlockFormat) -> None:
    if format.transposes:
        raise ValueError(
            f"a columnwise cast in {format.name} blocks is the transpose of the rowwise one: use "
            f"quantize_transpose(x, format)"
        )
    checks.castable(x, format)
    _check_columnwise(x, columnwise_format)


def _check_with_transpose(x: Tensor, format: BlockFormat) -> None:
    _check_square(format)
    checks.castable(x, format)


def _check_square(format: BlockFormat) -> None:
    if not format.transposes:
        raise ValueError(f"a cast in {format.name} blocks has no exact transpose: quantize x.t()")


def _decide_rowwise(x: Tensor, format: BlockFormat) -> Callable[..., Quantized]:
    checks.castable(x, format)
    kernels = cast_kernels(x, format)
    return recorded(kernels.quantize_rowwise, kernels.launches)


def _decide_columnwise(x: Tensor, format: BlockFormat) -> Callable[..., Quantized]:
    _check_columnwise(x, format)
    kernels = cast_kernels(x, format)
    return recorded(kernels.quantize_columnwise, kernels.launches)


def _decide_both(
    x: Tensor, format: BlockFormat, columnwise_format: BlockFormat
) -> Callable[..., tuple[Quantized, Quantized]]:
    _check_both(x, format, columnwise_format)
    kernels = cast_kernels(x, format, columnwise_format)
    return recorded(kernels.quantize_both, kernels.launches)


def _decide_with_transpose(
    x: Tensor, format: BlockFormat
) -> Callable[..., tuple[Quantized, Quantized]]:
    _check_with_transpose(x, format)
    kernels = cast_kernels(x, format)
    one_pass = kernels.quantize_with_transpose
    if one_pass is not None and x.shape[-2] % VECTOR_BYTES == 0:
        return recorded(one_pass, kernels.launches)
    return _in_two_passes


def _in_two_passes(x: Tensor, format: BlockFormat) -> tuple[Quantized, Quantized]:
    rowwise = _rowwise(x, format)
    return rowwise, _transpose(rowwise)


def _decide_transpose(x: Quantized) -> Callable[..., Quantized]:
    _check_square(x.format)
    kernels = cast_kernels(x.data, x.format)
    return recorded(kernels.transpose, kernels.launches)


def _decide_dequantize(x: Quantized, dtype: torch.dtype) -> Callable[..., Tensor]:
    kernels = cast_kernels(x.data, x.format)
    return recorded(kernels.dequantize, kernels.launches)


def _dispatch_rowwise(x: Tensor, format: BlockFormat) -> Quantized:
    checks.castable(x, format)
    data, scale = _rowwise_op(x, format.name)
    return Quantized(data, scale, format)


def _dispatch_columnwise(x: Tensor, format: BlockFormat) -> Quantized:
    _check_columnwise(x, format)
    data, scale = _columnwise_op(x, format.name)
    return Quantized(data, scale, format)


def _dispatch_both(
    x: Tensor, format: BlockFormat, columnwise_format: BlockFormat
) -> tuple[Quantized, Quantized]:
    _check_both(x, format, columnwise_format)
    row, row_scale, col, col_scale = _both_op(x, format.name, other_name(format, columnwise_format))
    return Quantized(row, row_scale, format), Quantized(col, col_scale, columnwise_format)


def _dispatch_with_transpose(x: Tensor, format: BlockFormat) -> tuple[Quantized, Quantized]:
    _check_with_transpose(x, format)
    row, row_scale, col, col_scale = _with_transpose_op(x, format.name)
    return Quantized(row, row_scale, format), Quantized(col, col_scale, format)


def _dispatch_transpose(x: Quantized) -> Quantized:
    _check_square(x.format)
    data, scale = _transpose_op(x.data, x.scale, x.format.name)
    return Quantized(data, scale, x.format)


def _dispatch_dequantize(x: Quantized, dtype: torch.dtype) -> Tensor:
    return _dequantize_op(x.data, x.scale, x.format.name, dtype)


_rowwise = Specialized(_decide_rowwise, _dispatch_rowwise)
_columnwise = Specialized(_decide_columnwise, _dispatch_columnwise)
_both = Specialized(_decide_both, _dispatch_both)
_with_transpose = Specialized(_decide_with_transpose, _dispatch_with_transpose)
_transpose = Specialized(_decide_transpose, _dispatch_transpose)
_dequantize = Specialized(_decide_dequantize, _dispatch_dequantize)


# Registered ops take tensors and the name of a format


def other_name(format: BlockFormat, columnwise_format: BlockFormat) -> str | None:
    """How ops of both casts are given the second format: None if it is the first."""
    other = columnwise_format.name
    return None if other == format.name else other


def _empty(shape: Sequence[int], format: str, device: torch.device) -> Pair:
    data, scale, _ = empty_quantized(shape, named(format), device)
    return data, scale


@torch.library.custom_op("blocktensor::quantize_rowwise", mutates_args=())
def _rowwise_op(x: Tensor, format: str) -> Pair:
    data, scale, _ = _rowwise.run(x, named(format))
    return data, scale


@torch.library.custom_op("blocktensor::quantize_columnwise", mutates_args=())
def _columnwise_op(x: Tensor, format: str) -> Pair:
    data, scale, _ = _columnwise.run(x, named(format))
    return data, scale


@torch.library.custom_op("blocktensor::quantize_both", mutates_args=())
def _both_op(x: Tensor, format: str, columnwise_format: str | None = None) -> Four:
    rowwise, columnwise = _both.run(x, named(format), named(columnwise_format or format))
    return rowwise.data, rowwise.scale, columnwise.data, columnwise.scale


@torch.library.custom_op("blocktensor::quantize_with_transpose", mutates_args=())
def _with_transpose_op(x: Tensor, format: str) -> Four:
    rowwise, columnwise = _with_transpose.run(x, named(format))
    return rowwise.data, rowwise.scale, columnwise.data, columnwise.scale


@torch.library.custom_op("blocktensor::transpose", mutates_args=())
def _transpose_op(data: Tensor, scale: Tensor, format: str) -> Pair:
    data, scale, _ = _transpose.run(Quantized(data, scale, named(format)))
    return data, scale


@torch.library.custom_op("blocktensor::dequantize", mutates_args=())
def _dequantize_op(data: Tensor, scale: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    return _dequantize.run(Quantized(data, scale, named(format)), dtype)


@torch.library.custom_op("blocktensor::quantize_transpose", mutates_args=())
def _quantize_transpose_op(x: Tensor, format: str) -> Pair:
    data, scale, _ = _quantize_transpose(x, named(format))
    return data, scale


@_quantize_transpose_op.register_fake
def _(x: Tensor, format: str) -> Pair:
    *lead, n, k = x.shape
    return _empty((*lead, k, n), format, x.device)


@_rowwise_op.register_fake
def _(x: Tensor, format: str) -> Pair:
    return _empty(x.shape, format, x.device)


@_columnwise_op.register_fake
def _(x: Tensor, format: str) -> Pair:
    data, scale, _ = empty_columnwise(x, named(format))
    return data, scale


@_both_op.register_fake
def _(x: Tensor, format: str, columnwise_format: str | None = None) -> Four:
    data, scale, _ = empty_columnwise(x, named(columnwise_format or format))
    return *_empty(x.shape, format, x.device), data, scale


@_with_transpose_op.register_fake
def _(x: Tensor, format: str) -> Four:
    *lead, n, k = x.shape
    return *_empty(x.shape, format, x.device), *_empty((*lead, k, n), format, x.device)


@_transpose_op.register_fake
def _(data: Tensor, scale: Tensor, format: str) -> Pair:
    *lead, n, k = data.shape
    return _empty((*lead, k, n), format, data.device)


@_dequantize_op.register_fake
def _(data: Tensor, scale: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    return torch.empty(data.shape, dtype=dtype, device=data.device)
