"""Casts of tokens in groups: the functions that the package calls, and their registered ops.

The rows of ``x[T, K]`` belong to groups, one after the other: rows up to ``offs[0]`` to group 0, up
to ``offs[1]`` to group 1, and so on. ``offs`` is on the device, and nothing here reads it on the
host. The columnwise blocks of a group begin anew; the rowwise ones lie along K in any case.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import checks
from ..formats import BlockFormat, Quantized, group_columns, named
from ..runtime.specialize import Specialized, recorded
from ..scale_layouts import empty_quantized
from .choose_backend import cast_kernels
from .ops import Four, Pair, other_name


def quantize_grouped(
    x: Tensor,
    offs: Tensor,
    format: BlockFormat,
    index: Tensor | None = None,
    columnwise_format: BlockFormat | None = None,
) -> tuple[Quantized, Quantized]:
    """The rowwise and the columnwise cast of ``x[T, K]`` in groups, from one read.

    Args:
        x: ``[T, K]`` bf16, fp16 or fp32; with ``index``, its rows before they are permuted.
        offs: int32 ``[E]``, the cumulative ends of the groups, nondecreasing and at most T.
        format: of blocks of one row.
        index: ``[T]`` int32 or int64: row i of the cast is ``x[index[i]]``.
        columnwise_format: of the columnwise cast; by default the same.

    Returns:
        The cast of :func:`~blocktensor.ops.cast.ops.quantize_rowwise`, data ``[T, K]``; and that of
        :func:`quantize_grouped_columnwise`.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices that do not fit.
    """
    return _both(x, offs, index, format, columnwise_format or format)


def quantize_grouped_columnwise(
    x: Tensor, offs: Tensor, format: BlockFormat, index: Tensor | None = None
) -> Quantized:
    """The columnwise cast of ``x[T, K]`` in groups, data ``[K, P]``; also in square blocks.

    Group e begins at the block after those of group e-1 and is filled up with zeros to whole
    blocks. P, :func:`~blocktensor.ops.formats.group_columns`, is the most that these can
    take; blocks after the last group's may hold anything. Raises as the cast of both.
    """
    return _columnwise(x, offs, index, format)


def gather_rows(x: Quantized, index: Tensor) -> Quantized:
    """Rows ``index`` of a cast in blocks of one row: the cast of ``x[index]``, from its bytes."""
    data = x.data.view(torch.uint8).index_select(0, index).view(x.data.dtype)
    made = Quantized(data, empty_quantized(data.shape, x.format, data.device).scale, x.format)
    made.scale.copy_(x.scale.index_select(0, index))
    return made


def columnwise_shape(x: Tensor, offs: Tensor, index: Tensor | None) -> tuple[int, int]:
    """``[K, P]``, the shape of the columnwise data of :func:`quantize_grouped_columnwise`."""
    rows = (x if index is None else index).shape[0]
    return x.shape[1], group_columns(rows, offs.shape[0])


def _check(x: Tensor, offs: Tensor, index: Tensor | None, *formats: BlockFormat) -> None:
    for format in formats:
        checks.castable(x, format)
    checks.rank(x, (2,), "the tensor to quantize", "flatten tokens to [T, K]")
    checks.group_ends(offs, x, "the tensor to quantize")
    if index is not None:
        checks.row_index(index, x)


def _check_both(
    x: Tensor,
    offs: Tensor,
    index: Tensor | None,
    format: BlockFormat,
    columnwise_format: BlockFormat,
) -> None:
    if format.rows != 1:
        raise ValueError(
            f"tokens in groups are cast in blocks of one row: got the format {format.name}"
        )
    _check(x, offs, index, format, columnwise_format)


def _decide_both(
    x: Tensor,
    offs: Tensor,
    index: Tensor | None,
    format: BlockFormat,
    columnwise_format: BlockFormat,
) -> Callable[..., tuple[Quantized, Quantized]]:
    _check_both(x, offs, index, format, columnwise_format)
    kernels = cast_kernels(x, format, columnwise_format)
    return recorded(kernels.quantize_grouped, kernels.launches)


def _decide_columnwise(
    x: Tensor, offs: Tensor, index: Tensor | None, format: BlockFormat
) -> Callable[..., Quantized]:
    _check(x, offs, index, format)
    kernels = cast_kernels(x, format)
    return recorded(kernels.quantize_grouped_columnwise, kernels.launches)


def _dispatch_both(
    x: Tensor,
    offs: Tensor,
    index: Tensor | None,
    format: BlockFormat,
    columnwise_format: BlockFormat,
) -> tuple[Quantized, Quantized]:
    _check_both(x, offs, index, format, columnwise_format)
    row, row_scale, col, col_scale = _both_op(
        x, offs, index, format.name, other_name(format, columnwise_format)
    )
    return Quantized(row, row_scale, format), Quantized(col, col_scale, columnwise_format)


def _dispatch_columnwise(
    x: Tensor, offs: Tensor, index: Tensor | None, format: BlockFormat
) -> Quantized:
    _check(x, offs, index, format)
    data, scale = _columnwise_op(x, offs, index, format.name)
    return Quantized(data, scale, format)


_both = Specialized(_decide_both, _dispatch_both)
_columnwise = Specialized(_decide_columnwise, _dispatch_columnwise)


@torch.library.custom_op("blocktensor::quantize_grouped", mutates_args=())
def _both_op(
    x: Tensor,
    offs: Tensor,
    index: Tensor | None,
    format: str,
    columnwise_format: str | None = None,
) -> Four:
    formats = named(format), named(columnwise_format or format)
    rowwise, columnwise = _both.run(x, offs, index, *formats)
    return rowwise.data, rowwise.scale, columnwise.data, columnwise.scale


@torch.library.custom_op("blocktensor::quantize_grouped_columnwise", mutates_args=())
def _columnwise_op(x: Tensor, offs: Tensor, index: Tensor | None, format: str) -> Pair:
    data, scale, _ = _columnwise.run(x, offs, index, named(format))
    return data, scale


@_both_op.register_fake
def _(
    x: Tensor,
    offs: Tensor,
    index: Tensor | None,
    format: str,
    columnwise_format: str | None = None,
) -> Four:
    rows = (x if index is None else index).shape[0]
    data, scale, _ = empty_quantized((rows, x.shape[1]), named(format), x.device)
    other = named(columnwise_format or format)
    columnwise = empty_quantized(columnwise_shape(x, offs, index), other, x.device)
    return data, scale, columnwise.data, columnwise.scale


@_columnwise_op.register_fake
def _(x: Tensor, offs: Tensor, index: Tensor | None, format: str) -> Pair:
    data, scale, _ = empty_quantized(columnwise_shape(x, offs, index), named(format), x.device)
    return data, scale
