"""Parts of BlockwiseFP8Tensors, and concatenations: slice, split, select, cat.

Cuts are made on block boundaries. A cut along the rows of a form is a view of its bytes; a cut
along its columns is a copy, since tensor cores read contiguous rows. A 128x128 part keeps one form,
from which the other is derived; a 1x128 part keeps both, which are two casts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.formats import Quantized, ceil_div
from ..ops.scale_layouts import columnwise_width, laid_out
from .base import view_of_its_kind
from .fp8_tensor import BlockwiseFP8Tensor
from .operand import Operand

aten = torch.ops.aten


def _part(x: BlockwiseFP8Tensor, dim: int, start: int, stop: int, op: str) -> BlockwiseFP8Tensor:
    """Indices ``start`` to ``stop`` along ``dim``."""
    if start == 0 and stop == x.shape[dim]:
        return x.relabel()
    shape = list(x.shape)
    shape[dim] = stop - start
    operand = x.operand
    if _in_squares(x) and dim < x.ndim - 2:
        lead = (None if form is None else _matrices(form, start, stop) for form in operand)
        return _like(x, Operand(*lead), shape)
    columns = dim == x.ndim - 1
    if columns:  # the columns of one form are the rows of the other
        operand = operand.transposed()
    rows = math.prod(x.shape[dim + 1 : -1]) if not columns else 1  # of data, for an index of dim
    across = operand.columnwise
    in_rows = operand.rowwise is not None and operand.rowwise.format.rows > 1
    _check_boundary(x, dim, start, stop, max(rows, 1), across is not None or in_rows, op)
    start, stop = start * rows, stop * rows
    along = None if operand.rowwise is None else _rows(operand.rowwise, start, stop)
    made = Operand(along, None)
    if across is not None and not (_in_squares(x) and along is not None):
        made = Operand(along, _columns(across, start, stop))
    return _like(x, made.transposed() if columns else made, shape)


def _check_boundary(
    x: BlockwiseFP8Tensor, dim: int, start: int, stop: int, rows: int, blocks: bool, op: str
) -> None:
    """Refuse a cut through a block; ``blocks``: those of a form held lie along ``dim``."""
    if not blocks:
        return
    size, block = x.shape[dim], x.format.cols
    for index in (start, stop):
        if index != size and index * rows % block:
            step = block // math.gcd(block, rows)
            below = index // step * step
            raise ValueError(
                f"{op} of a BlockwiseFP8Tensor {list(x.shape)} at index {index} of dimension {dim} "
                f"cuts through a block of {block}: the nearest boundaries are {below} and "
                f"{min(below + step, size)}; call .dequantize() first to cut elsewhere"
            )


def _rows(form: Quantized, start: int, stop: int) -> Quantized:
    data, scale, format = form
    first, last = start // format.rows, ceil_div(stop, format.rows)
    return Quantized(data[..., start:stop, :], scale[..., first:last, :], format)


def _columns(form: Quantized, start: int, stop: int) -> Quantized:
    data, scale, format = form
    first, last = start // format.cols, ceil_div(stop, format.cols)
    end = columnwise_width(stop, format) if start < stop else stop  # with the zeros at the end
    return laid_out(data[..., start:end].contiguous(), scale[..., first:last], format)


def _matrices(form: Quantized, start: int, stop: int) -> Quantized:
    data, scale, format = form
    return Quantized(data[start:stop], scale[start:stop], format)


def _like(x: BlockwiseFP8Tensor, operand: Operand, shape: Sequence[int]) -> BlockwiseFP8Tensor:
    strides = None
    if not x.is_contiguous() and len(shape) > 1:  # as its transpose would have them
        *lead, n, k = torch.empty((*shape[:-2], shape[-1], shape[-2]), device="meta").stride()
        strides = [*lead, k, n]
    return BlockwiseFP8Tensor(
        *operand, shape=shape, strides=strides, dtype=x.dtype, recipe=x.recipe, formats=x.formats
    )


def _dim(x: BlockwiseFP8Tensor, dim: int, op: str) -> int:
    """``dim`` counted from 0, where this op can cut there."""
    if not -x.ndim <= dim < x.ndim:
        raise IndexError(f"{op}: dimension {dim} of a tensor with {x.ndim}")
    dim %= x.ndim
    if dim not in (0, x.ndim - 2, x.ndim - 1) or (0 < dim < x.ndim - 1 and not _in_squares(x)):
        raise NotImplementedError(
            f"{op} along dimension {dim} of a BlockwiseFP8Tensor {list(x.shape)}: its bytes are a "
            f"matrix of the last dimension by all others, which can be cut along the first "
            f"dimension and the last; call .dequantize() first"
        )
    return dim


def _in_squares(x: BlockwiseFP8Tensor) -> bool:
    return x.format.transposes


@view_of_its_kind
def _slice(
    func: Any,
    x: BlockwiseFP8Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> BlockwiseFP8Tensor:
    dim = _dim(x, dim, "a slice")
    first, last, _ = slice(start, end).indices(x.shape[dim])
    if step != 1:
        raise NotImplementedError(f"a slice with step {step} of a BlockwiseFP8Tensor: only 1")
    return _part(x, dim, first, max(first, last), "a slice")


@view_of_its_kind
def _select(func: Any, x: BlockwiseFP8Tensor, dim: int, index: int) -> BlockwiseFP8Tensor:
    dim = _dim(x, dim, "select")
    if x.ndim < 3 or dim:
        raise NotImplementedError(
            f"select({dim}, {index}) of a BlockwiseFP8Tensor {list(x.shape)}: only of the first of "
            f"three or more dimensions; call .dequantize() first"
        )
    if not -x.shape[0] <= index < x.shape[0]:
        raise IndexError(f"index {index} of a dimension of {x.shape[0]}")
    index %= x.shape[0]
    part = _part(x, 0, index, index + 1, "select")
    shape = part.shape[1:]
    if not _in_squares(x):
        return part.relabel(shape=shape)
    forms = (
        None if form is None else Quantized(form.data[0], form.scale[0], form.format)
        for form in part.operand
    )
    return _like(x, Operand(*forms), shape)


@view_of_its_kind
def _unbind(func: Any, x: BlockwiseFP8Tensor, dim: int = 0) -> list[BlockwiseFP8Tensor]:
    return [_select(aten.select.int, x, dim, i) for i in range(x.shape[_dim(x, dim, "unbind")])]


@view_of_its_kind
def _split(func: Any, x: BlockwiseFP8Tensor, size: int, dim: int = 0) -> list[BlockwiseFP8Tensor]:
    dim = _dim(x, dim, "split")
    total = x.shape[dim]
    if size < 1:
        raise ValueError(f"split into parts of {size}: expected at least 1")
    return [
        _part(x, dim, at, min(at + size, total), "split") for at in range(0, max(total, 1), size)
    ]


@view_of_its_kind
def _split_with_sizes(
    func: Any, x: BlockwiseFP8Tensor, sizes: list[int], dim: int = 0
) -> list[BlockwiseFP8Tensor]:
    dim = _dim(x, dim, "split")
    if sum(sizes) != x.shape[dim]:
        raise ValueError(f"split into {sizes}: expected a sum of {x.shape[dim]}")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [_part(x, dim, end - size, end, "split") for end, size in zip(ends, sizes, strict=True)]


def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> BlockwiseFP8Tensor:
    first = tensors[0]
    fp8 = [x for x in tensors if isinstance(x, BlockwiseFP8Tensor)]
    kinds = {(x.formats, x.dtype, x.ndim, x.is_contiguous()) for x in fp8}
    if not isinstance(first, BlockwiseFP8Tensor) or len(fp8) < len(tensors) or len(kinds) > 1:
        found = ", ".join(
            repr(x) if isinstance(x, BlockwiseFP8Tensor) else f"a {x.dtype} tensor" for x in tensors
        )
        raise TypeError(
            f"cat of {found}: expected BlockwiseFP8Tensors of one block_shape, dtype and scale "
            f"rounding; call .dequantize() first"
        )
    dim = _dim(first, dim, "cat")
    shape = list(first.shape)
    for x in fp8[1:]:
        if [*x.shape[:dim], *x.shape[dim + 1 :]] != [*shape[:dim], *shape[dim + 1 :]]:
            raise ValueError(f"cat along {dim} of shapes {[list(x.shape) for x in fp8]}")
    shape[dim] = sum(x.shape[dim] for x in fp8)
    lead = _in_squares(first) and dim < first.ndim - 2
    columns = dim == first.ndim - 1
    rows = 1 if columns or lead else math.prod(first.shape[dim + 1 : -1])
    across = [x.operand[0 if columns else 1] is not None for x in fp8]
    squares = [form.format.rows > 1 for x in fp8 for form in x.operand if form is not None]
    for x in [] if lead else fp8[:-1]:
        block = x.format.cols
        if any(squares + across) and x.shape[dim] * rows % block:
            raise ValueError(
                f"cat along {dim}: {list(x.shape)} ends inside a block of {block}, and only the "
                f"last part may; call .dequantize() first"
            )
    made: list[Quantized | None] = []
    for side in (0, 1):
        forms = [x.operand[side] for x in fp8]
        held = [form for form in forms if form is not None]
        if len(held) < len(fp8):
            made.append(None)
            continue
        at = 0 if lead else -2 if (side == 1) == columns else -1
        width = min(form.data.shape[-1] for form in held)  # some may have zeros after it
        parts = [form.data if at == -1 else form.data[..., :width] for form in held]
        data = torch.cat(parts, at)
        scale = torch.cat([form.scale for form in held], at)
        made.append(laid_out(data, scale, first.formats[side]))
    if made == [None, None]:
        raise ValueError("cat of BlockwiseFP8Tensors that hold no form in common")
    return _like(first, Operand(*made), shape)


PARTS: dict[Any, Callable[..., Any]] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.cat.default: _cat,
}
