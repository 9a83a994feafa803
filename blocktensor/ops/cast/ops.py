"""Casts, transposes and dequantize: the ops that the package calls.

The rows of the ``x[T, K]`` of a grouped cast belong to groups, one after the other: rows up to
``offs[0]`` to group 0, up to ``offs[1]`` to group 1, and so on. ``offs`` is on the device, and
nothing here reads it on the host. The columnwise blocks of a group begin anew; the rowwise ones lie
along K in any case.

A shard is the part of a weight that one rank holds. A block may lie in several shards, so the cast
of a shard has two steps: the amax of its share of the blocks; then, after a maximum over all
shards, the data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import checks
from ..formats import BlockFormat, Quantized, ceil_div
from ..op import op, runner
from ..runtime.specialize import recorded
from ..scale_layouts import VECTOR_BYTES, columnwise_width, empty_columnwise, empty_quantized
from .choose_backend import cast_backend
from .producer import Forms, empty_forms


def _check(x: Tensor, format: BlockFormat, fits: bool) -> None:
    """Raise unless ``x`` can be cast in ``format`` and ``fits``, which callers guarantee."""
    checks.castable(x, format)
    checks.fit(fits)


@op(cast_backend, check=checks.castable)
def quantize_rowwise(x: Tensor, format: BlockFormat) -> Quantized:
    """Cast ``x[..., R, C]``; see :func:`blocktensor.ops.reference.quantize_rowwise`.

    Raises:
        TypeError, ValueError: ``x`` is not bf16, fp16 or fp32, or not a matrix (or, in square
            blocks, a stack of them).
    """
    return empty_quantized(x.shape, format, x.device)


@op(cast_backend, check=lambda x, format: _check(x, format, format.mxfp4_group is None))
def quantize_columnwise(x: Tensor, format: BlockFormat) -> Quantized:
    """Cast the transpose of ``x[M, K]``; see :func:`blocktensor.ops.reference.quantize_columnwise`.

    In square blocks, it is the transpose of the rowwise cast, followed by zeros.

    Raises:
        TypeError, ValueError: ``x`` is not bf16, fp16 or fp32, or not a matrix.
    """
    return empty_columnwise(x, format)


@op(cast_backend, check=lambda x, format, _: _check(x, format, format.rows == 1))
def quantize_both(
    x: Tensor, format: BlockFormat, columnwise_format: BlockFormat | None = None
) -> tuple[Quantized, Quantized]:
    """Make the rowwise and columnwise casts of ``x[M, K]`` from one read.

    Args:
        x: ``[M, K]`` bf16, fp16 or fp32.
        format: of the rowwise cast, not of square blocks.
        columnwise_format: of the columnwise cast; by default the same.

    Raises:
        TypeError, ValueError: as :func:`quantize_columnwise`.
    """
    rowwise = empty_quantized(x.shape, format, x.device)
    return rowwise, empty_columnwise(x, columnwise_format or format)


def quantize_forms(
    x: Tensor, rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> tuple[Quantized | None, Quantized | None]:
    """Cast an activation or gradient ``x[..., K]`` from one read, each form in its format.

    A form without a format is None. Leading dimensions are flattened. Raises as
    :func:`quantize_both`, and for a scalar.
    """
    if x.ndim == 0:
        name = next(format.name for format in (rowwise, columnwise) if format is not None)
        raise ValueError(f"cannot quantize a scalar in {name} blocks: expected shape [..., K]")
    if x.ndim != 2:
        x = x.flatten(0, -2) if x.ndim > 2 else x.unsqueeze(0)
    if rowwise is not None and columnwise is not None:
        return quantize_both(x, rowwise, columnwise)
    return (
        None if rowwise is None else quantize_rowwise(x, rowwise),
        None if columnwise is None else quantize_columnwise(x, columnwise),
    )


@op(lambda x: cast_backend(x.data, x.format))
def transpose(x: Quantized) -> Quantized:
    """Transpose a cast ``[..., N, K]`` in square blocks, exactly."""
    return empty_quantized(x.data.mT.shape, x.format, x.data.device)


def _is_columnwise(x: Tensor, format: BlockFormat) -> bool:
    """Return True if the transposed cast of ``x`` is computed as the columnwise cast.

    They are equal if the latter needs no zeros, and no groups of columns are rounded to a grid.
    """
    if x.ndim != 2 or x.stride(-2) == 1 or format.mxfp4_group is not None:
        return False
    return columnwise_width(x.shape[0], format) == x.shape[0]


def _decide_transpose(x: Tensor, format: BlockFormat) -> Callable[..., Quantized]:
    function: Callable[..., Quantized] = _of_rowwise
    if _is_columnwise(x, format):
        function = quantize_columnwise
    elif x.stride(-2) == 1 and format.mxfp4_group is None:
        function = _of_transposed
    return recorded(function, cast_backend(x, format).launches)


def _of_transposed(x: Tensor, format: BlockFormat) -> Quantized:
    return quantize_rowwise(x.transpose(-1, -2), format)


def _of_rowwise(x: Tensor, format: BlockFormat) -> Quantized:
    return transpose(quantize_rowwise(x, format))


@op(decide=_decide_transpose, check=lambda x, format: _check(x, format, format.transposes))
def quantize_transpose(x: Tensor, format: BlockFormat) -> Quantized:
    """Return ``transpose(quantize_rowwise(x, format))`` of ``x[..., M, K]``, in one pass if it can.

    A columnwise cast has these bytes if it needs no columns of zeros. This is a separate op because
    compilers merge equal casts, and would keep a cast of forward until backward.

    Raises:
        TypeError, ValueError: as :func:`quantize_rowwise`.
    """
    if _is_columnwise(x, format):
        return empty_columnwise(x, format)
    return empty_quantized(x.mT.shape, format, x.device)


def _decide_with_transpose(
    x: Tensor, format: BlockFormat
) -> Callable[..., tuple[Quantized, Quantized]]:
    backend = cast_backend(x, format)
    name = "quantize_with_transpose"
    if x.shape[-2] % VECTOR_BYTES or backend.function(name) is None:
        return recorded(_in_two_passes, backend.launches)
    return runner(backend, name)


def _in_two_passes(x: Tensor, format: BlockFormat) -> tuple[Quantized, Quantized]:
    rowwise = quantize_rowwise(x, format)
    return rowwise, transpose(rowwise)


@op(decide=_decide_with_transpose, check=lambda x, format: _check(x, format, format.transposes))
def quantize_with_transpose(x: Tensor, format: BlockFormat) -> tuple[Quantized, Quantized]:
    """Cast ``x[..., N, K]`` and transpose the cast, from one read where possible.

    Raises:
        TypeError, ValueError: as :func:`quantize_rowwise`.
    """
    rowwise = empty_quantized(x.shape, format, x.device)
    return rowwise, empty_quantized(x.mT.shape, format, x.device)


@op(lambda x, dtype: cast_backend(x.data, x.format))
def dequantize(x: Quantized, dtype: torch.dtype) -> Tensor:
    """Return ``data * scale`` in ``dtype``; see :func:`blocktensor.ops.reference.dequantize`."""
    return torch.empty(x.data.shape, dtype=dtype, device=x.data.device)


def _check_grouped(
    x: Tensor, offs: Tensor, rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> None:
    formats = [format for format in (rowwise, columnwise) if format is not None]
    for format in formats:
        checks.castable(x, format)
    checks.fit(x.ndim == 2, rowwise is None or rowwise.rows == 1, formats != [])
    checks.group_ends(offs, x, "the tensor to quantize")


@op(
    lambda x, _, *formats: cast_backend(x, *(f for f in formats if f is not None)),
    check=_check_grouped,
    formats=lambda x, _, *formats: formats,
)
def quantize_grouped(
    x: Tensor, offs: Tensor, rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> Forms:
    """Make the rowwise and the columnwise cast of ``x[T, K]`` in groups, from one read.

    Both have the size of a cast of :func:`~blocktensor.ops.formats.group_rows` rows: few sizes
    occur then, and recorded launches of one size work for all T that round up to it.

    Args:
        x: ``[T, K]`` bf16, fp16 or fp32.
        offs: int32 ``[E]``, the cumulative ends of the groups, nondecreasing and at most T.
        rowwise: format of the rowwise cast, with blocks of one row; None for no rowwise cast.
        columnwise: format of the columnwise cast; None for no columnwise cast.

    Returns:
        The cast of :func:`quantize_rowwise`, data ``[R, K]``, in which rows from T on may hold
        anything; and the columnwise cast, data ``[K, P]``: group e begins at the block after the
        last block of group e-1 and is filled up with zeros to whole blocks. P,
        :func:`~blocktensor.ops.formats.group_columns`, is the most columns that the groups can
        take; blocks after the last group's may hold anything.

    Raises:
        TypeError, ValueError: as :func:`quantize_columnwise`, or for ``offs``.
    """
    return empty_forms(x, offs, rowwise, columnwise)


def _check_derived(
    x: Quantized, columnwise: BlockFormat, offs: Tensor | None, tokens: int | None
) -> None:
    checks.quantized(x)
    fits = not isinstance(tokens, int) or tokens <= x.data.shape[0]  # symbolic: while tracing
    checks.fit(x.format.rows == 1, x.format.power_of_two, columnwise.power_of_two, fits)
    checks.fit(tokens is None or offs is not None)
    if offs is not None:
        checks.group_ends(offs, x.data, "FP8 data")


@op(
    lambda x, columnwise, *_: cast_backend(x.data, x.format, columnwise),
    check=_check_derived,
    formats=lambda x, columnwise, *_: columnwise,
)
def columnwise_from_rowwise(
    x: Quantized,
    columnwise: BlockFormat,
    offs: Tensor | None = None,
    tokens: int | None = None,
) -> Quantized:
    """Derive the columnwise form of ``x[T, K]`` from its rowwise bytes, without another rounding.

    Both formats have power-of-two scales. With ``offs``, blocks begin anew in every group of rows.
    ``tokens``: T, if x has more rows, as casts in groups have (:func:`quantize_grouped`).
    See :func:`blocktensor.ops.reference.columnwise_from_rowwise`.
    """
    return empty_columnwise(x.data, columnwise, offs)


@op(
    lambda x, format, *place: cast_backend(x, format),
    check=lambda x, format, *place: _check(x, format, format.transposes),
)
def shard_amax(x: Tensor, format: BlockFormat, row: int, col: int) -> Tensor:
    """See :func:`blocktensor.ops.reference.shard_amax`."""
    rows, cols = format.block_shape
    blocks = ceil_div(row + x.shape[-2], rows), ceil_div(col + x.shape[-1], cols)
    return torch.empty((*x.shape[:-2], *blocks), dtype=torch.float32, device=x.device)


@op(
    lambda x, amax, format, *place: cast_backend(x, format),
    check=lambda x, amax, format, *place: _check(x, format, format.transposes),
)
def quantize_shard(
    x: Tensor, amax: Tensor, format: BlockFormat, row: int, col: int, own: Tensor | None = None
) -> Tensor:
    """See :func:`blocktensor.ops.reference.quantize_shard`."""
    return torch.empty(x.shape, dtype=format.dtype, device=x.device)
