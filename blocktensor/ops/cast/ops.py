"""Casts, transposes and dequantize: the functions that the package calls, and their registered ops.

A registered op costs tens of microseconds a call in eager mode, so each function runs its decision
(``ops/runtime/specialize.py``) directly unless the dispatcher must see the op. Both ways run the
same code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..formats import BlockFormat, Quantized, named
from ..runtime.specialize import Specialized, must_dispatch, recorded
from ..scale_layouts import empty_quantized
from .choose_backend import cast_kernels

Pair = tuple[Tensor, Tensor]


def quantize_rowwise(x: Tensor, format: BlockFormat) -> Quantized:
    """Cast ``x[..., R, C]``; see :func:`blocktensor.ops.reference.quantize_rowwise`.

    Raises:
        TypeError, ValueError: ``x`` is not bf16, fp16 or fp32, or not a matrix (or, in square
            blocks, a stack of them).
    """
    if must_dispatch(x):
        _check_castable(x, format)
        data, scale = _rowwise_op(x, format.name)
        return Quantized(data, scale, format)
    return _rowwise.find(x, format)(x, format)


def quantize_columnwise(x: Tensor, format: BlockFormat) -> Quantized:
    """Cast the transpose of ``x[M, K]``, data written ``[K, M]``.

    Raises:
        TypeError, ValueError: as :func:`quantize_rowwise`; a format of square blocks, whose
            columnwise cast is the transpose of the rowwise one.
    """
    if must_dispatch(x):
        _check_both_ways(x, format)
        data, scale = _columnwise_op(x, format.name)
        return Quantized(data, scale, format)
    return _columnwise.find(x, format)(x, format)


def quantize_both(x: Tensor, format: BlockFormat) -> tuple[Quantized, Quantized]:
    """The rowwise and the columnwise cast of ``x[M, K]`` from one read.

    Raises:
        TypeError, ValueError: as :func:`quantize_columnwise`.
    """
    if must_dispatch(x):
        _check_both_ways(x, format)
        data, scale, columnwise_data, columnwise_scale = _both_op(x, format.name)
        return Quantized(data, scale, format), Quantized(columnwise_data, columnwise_scale, format)
    return _both.find(x, format)(x, format)


def transpose(x: Quantized) -> Quantized:
    """Exact transpose of a cast ``[..., N, K]`` in square blocks.

    Raises:
        ValueError: blocks that are not square.
    """
    if must_dispatch(x.data):
        _check_square(x.format)
        data, scale = _transpose_op(x.data, x.scale, x.format.name)
        return Quantized(data, scale, x.format)
    return _transpose.find(x)(x)


def dequantize(x: Quantized, dtype: torch.dtype) -> Tensor:
    """``data * scale`` in ``dtype``; see :func:`blocktensor.ops.reference.dequantize`."""
    if must_dispatch(x.data):
        return _dequantize_op(x.data, x.scale, x.format.name, dtype)
    return _dequantize.find(x, dtype)(x, dtype)


def _check_castable(x: Tensor, format: BlockFormat) -> None:
    checks.high_precision(x, "the tensor to quantize")
    if format.rows == 1:
        remedy = "flatten leading dimensions with .flatten(0, -2)"
    else:
        remedy = f"{format.name} blocks need [N, K] or [E, N, K]"
    checks.rank(x, format.ranks, "the tensor to quantize", remedy)


def _check_both_ways(x: Tensor, format: BlockFormat) -> None:
    if format.transposes:
        raise ValueError(
            f"a columnwise cast in {format.name} blocks is the transpose of the rowwise one: use "
            f"transpose(quantize_rowwise(x, format))"
        )
    _check_castable(x, format)


def _check_square(format: BlockFormat) -> None:
    if not format.transposes:
        raise ValueError(f"a cast in {format.name} blocks has no exact transpose: quantize x.t()")


# Decisions


def _cast_key(x: Tensor, format: BlockFormat) -> Hashable:
    return x.shape, x.stride(), x.dtype, x.data_ptr() & 15, x.device, format


def _quantized_key(x: Quantized, dtype: torch.dtype | None = None) -> Hashable:
    data, scale, format = x
    aligned = data.data_ptr() & 15, scale.data_ptr() & 15
    layout = data.shape, data.stride(), scale.shape, scale.stride()
    return layout, data.dtype, scale.dtype, aligned, data.device, format, dtype


def _decide_rowwise(x: Tensor, format: BlockFormat) -> Callable[..., Quantized]:
    _check_castable(x, format)
    kernels = cast_kernels(x, format)
    return recorded(kernels.quantize_rowwise, kernels.launches)


def _decide_columnwise(x: Tensor, format: BlockFormat) -> Callable[..., Quantized]:
    _check_both_ways(x, format)
    kernels = cast_kernels(x, format)
    return recorded(kernels.quantize_columnwise, kernels.launches)


def _decide_both(x: Tensor, format: BlockFormat) -> Callable[..., tuple[Quantized, Quantized]]:
    _check_both_ways(x, format)
    kernels = cast_kernels(x, format)
    return recorded(kernels.quantize_both, kernels.launches)


def _decide_transpose(x: Quantized) -> Callable[..., Quantized]:
    _check_square(x.format)
    kernels = cast_kernels(x.data, x.format)
    return recorded(kernels.transpose, kernels.launches)


def _decide_dequantize(x: Quantized, dtype: torch.dtype) -> Callable[..., Tensor]:
    kernels = cast_kernels(x.data, x.format)
    return recorded(kernels.dequantize, kernels.launches)


_rowwise = Specialized(_decide_rowwise, _cast_key)
_columnwise = Specialized(_decide_columnwise, _cast_key)
_both = Specialized(_decide_both, _cast_key)
_transpose = Specialized(_decide_transpose, _quantized_key)
_dequantize = Specialized(_decide_dequantize, _quantized_key)


# Registered ops, whose arguments are tensors and a format's name


def _register(name: str, schema: str, function: Callable[..., Any]) -> Any:
    qualified = f"blocktensor::{name}"
    return torch.library.custom_op(qualified, function, mutates_args=(), schema=schema)


def _rowwise_body(x: Tensor, format: str) -> Pair:
    data, scale, _ = _rowwise.find(x, named(format))(x, named(format))
    return data, scale


def _columnwise_body(x: Tensor, format: str) -> Pair:
    data, scale, _ = _columnwise.find(x, named(format))(x, named(format))
    return data, scale


def _both_body(x: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rowwise, columnwise = _both.find(x, named(format))(x, named(format))
    return rowwise.data, rowwise.scale, columnwise.data, columnwise.scale


def _transpose_body(data: Tensor, scale: Tensor, format: str) -> Pair:
    x = Quantized(data, scale, named(format))
    made = _transpose.find(x)(x)
    return made.data, made.scale


def _dequantize_body(data: Tensor, scale: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    x = Quantized(data, scale, named(format))
    return _dequantize.find(x, dtype)(x, dtype)


_CAST = "(Tensor x, str format) -> (Tensor, Tensor)"
_rowwise_op = _register("quantize_rowwise", _CAST, _rowwise_body)
_columnwise_op = _register("quantize_columnwise", _CAST, _columnwise_body)
_both_op = _register(
    "quantize_both", "(Tensor x, str format) -> (Tensor, Tensor, Tensor, Tensor)", _both_body
)
_transpose_op = _register(
    "transpose", "(Tensor data, Tensor scale, str format) -> (Tensor, Tensor)", _transpose_body
)
_dequantize_op = _register(
    "dequantize",
    "(Tensor data, Tensor scale, str format, ScalarType dtype) -> Tensor",
    _dequantize_body,
)


@_rowwise_op.register_fake
def _(x: Tensor, format: str) -> Pair:
    data, scale, _ = empty_quantized(x.shape, named(format), x.device)
    return data, scale


@_columnwise_op.register_fake
def _(x: Tensor, format: str) -> Pair:
    data, scale, _ = empty_quantized((x.shape[1], x.shape[0]), named(format), x.device)
    return data, scale


@_both_op.register_fake
def _(x: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, k = x.shape
    row, row_scale, _ = empty_quantized((m, k), named(format), x.device)
    col, col_scale, _ = empty_quantized((k, m), named(format), x.device)
    return row, row_scale, col, col_scale


@_transpose_op.register_fake
def _(data: Tensor, scale: Tensor, format: str) -> Pair:
    *lead, n, k = data.shape
    made, made_scale, _ = empty_quantized((*lead, k, n), named(format), data.device)
    return made, made_scale


@_dequantize_op.register_fake
def _(data: Tensor, scale: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    return torch.empty(data.shape, dtype=dtype, device=data.device)
