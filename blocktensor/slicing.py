"""Parts of BlockwiseFP8Tensors, and wholes of parts: slice, split, select, cat.

Fills ``ATEN_OPS`` further. Cuts are made on block boundaries. What is cut along the rows of a form
is a view of its bytes; what is cut along its columns is a copy, since tensor cores read rows that
are contiguous. A 128x128 part keeps one form, from which the other is derived; a 1x128 part keeps
both, which are two casts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .dispatch import implements, view_of_its_kind
from .ops import checks
from .ops.layouts import BLOCK, SQUARE_BLOCK, Form, ceil_div
from .tensor import ATEN_OPS, BlockwiseFP8Tensor

aten = torch.ops.aten


def _part(x: BlockwiseFP8Tensor, dim: int, start: int, stop: int, op: str) -> BlockwiseFP8Tensor:
    """Indices ``start`` to ``stop`` along ``dim``."""
    if start == 0 and stop == x.shape[dim]:
        return x.relabel()
    shape = list(x.shape)
    shape[dim] = stop - start
    row, col = x.forms()
    if _in_squares(x) and dim < x.ndim - 2:
        lead = [None if form is None else _along(form, 0, start, stop) for form in (row, col)]
        return _like(x, lead[0], lead[1], shape)
    columns = dim == x.ndim - 1
    if columns:  # the columns of one form are the rows of the other
        row, col = col, row
    rows = math.prod(x.shape[dim + 1 : -1]) if not columns else 1  # of bytes, for an index of dim
    _check_boundary(x, dim, start, stop, 1 if rows == 0 else rows, col is not None, op)
    start, stop = start * rows, stop * rows
    per_scale = x.block_shape[0]
    cut = None if row is None else _rows(row, start, stop, per_scale)
    other = None
    if col is not None and not (_in_squares(x) and cut is not None):
        other = _columns(col, start, stop, x.block_shape)
    return _like(x, other, cut, shape) if columns else _like(x, cut, other, shape)


def _check_boundary(
    x: BlockwiseFP8Tensor, dim: int, start: int, stop: int, rows: int, across: bool, op: str
) -> None:
    """Refuse a cut through a block; ``across``: whether blocks of a held form lie along ``dim``."""
    if not _in_squares(x) and not across:
        return
    size = x.shape[dim]
    for index in (start, stop):
        if index != size and index * rows % BLOCK:
            step = BLOCK // math.gcd(BLOCK, rows)
            below = index // step * step
            raise ValueError(
                f"{op} of a BlockwiseFP8Tensor {list(x.shape)} at index {index} of dimension {dim} "
                f"cuts through a block of 128: the nearest boundaries are {below} and "
                f"{min(below + step, size)}; call .dequantize() first to cut elsewhere"
            )


def _rows(form: Form, start: int, stop: int, per_scale: int) -> Form:
    data, scale = form
    first, last = start // per_scale, ceil_div(stop, per_scale)
    return data[..., start:stop, :], scale[..., first:last, :]


def _columns(form: Form, start: int, stop: int, block_shape: tuple[int, int]) -> Form:
    data, scale = form
    data = data[..., start:stop].contiguous()
    scale = scale[..., start // BLOCK : ceil_div(stop, BLOCK)]
    return data, checks.laid_out(scale, data, block_shape)


def _along(form: Form, dim: int, start: int, stop: int) -> Form:
    data, scale = form
    return data.narrow(dim, start, stop - start), scale.narrow(dim, start, stop - start)


def _like(
    x: BlockwiseFP8Tensor, row: Form | None, col: Form | None, shape: Sequence[int]
) -> BlockwiseFP8Tensor:
    strides = None
    if not x.is_contiguous() and len(shape) > 1:  # as its transpose would have them
        *lead, n, k = torch.empty((*shape[:-2], shape[-1], shape[-2]), device="meta").stride()
        strides = [*lead, k, n]
    return BlockwiseFP8Tensor(
        row,
        col,
        shape=shape,
        strides=strides,
        dtype=x.dtype,
        block_shape=x.block_shape,
        recipe=x.recipe,
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
    return x.block_shape == SQUARE_BLOCK


@implements(ATEN_OPS, aten.slice.Tensor)
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


@implements(ATEN_OPS, aten.select.int)
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
    forms = [None if form is None else (form[0][0], form[1][0]) for form in part.forms()]
    return _like(x, forms[0], forms[1], shape)


@implements(ATEN_OPS, aten.unbind.int)
@view_of_its_kind
def _unbind(func: Any, x: BlockwiseFP8Tensor, dim: int = 0) -> list[BlockwiseFP8Tensor]:
    return [_select(aten.select.int, x, dim, i) for i in range(x.shape[_dim(x, dim, "unbind")])]


@implements(ATEN_OPS, aten.split.Tensor)
@view_of_its_kind
def _split(func: Any, x: BlockwiseFP8Tensor, size: int, dim: int = 0) -> list[BlockwiseFP8Tensor]:
    dim = _dim(x, dim, "split")
    total = x.shape[dim]
    if size < 1:
        raise ValueError(f"split into parts of {size}: expected at least 1")
    return [
        _part(x, dim, at, min(at + size, total), "split") for at in range(0, max(total, 1), size)
    ]


@implements(ATEN_OPS, aten.split_with_sizes.default)
@view_of_its_kind
def _split_with_sizes(
    func: Any, x: BlockwiseFP8Tensor, sizes: list[int], dim: int = 0
) -> list[BlockwiseFP8Tensor]:
    dim = _dim(x, dim, "split")
    if sum(sizes) != x.shape[dim]:
        raise ValueError(f"split into {sizes}: expected a sum of {x.shape[dim]}")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [_part(x, dim, end - size, end, "split") for end, size in zip(ends, sizes, strict=True)]


@implements(ATEN_OPS, aten.cat.default)
def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> BlockwiseFP8Tensor:
    first = tensors[0]
    fp8 = [x for x in tensors if isinstance(x, BlockwiseFP8Tensor)]
    kinds = {(x.block_shape, x.dtype, x.recipe.scale, x.ndim, x.is_contiguous()) for x in fp8}
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
    across = [x.forms()[0 if columns else 1] is not None for x in fp8]
    for x in [] if lead else fp8[:-1]:
        if (_in_squares(x) or any(across)) and x.shape[dim] * rows % BLOCK:
            raise ValueError(
                f"cat along {dim}: {list(x.shape)} ends inside a block of 128, and only the last "
                f"part may; call .dequantize() first"
            )
    made: list[Form | None] = []
    for side in (0, 1):
        forms = [x.forms()[side] for x in fp8]
        held = [form for form in forms if form is not None]
        if len(held) < len(fp8):
            made.append(None)
            continue
        at = 0 if lead else -2 if (side == 1) == columns else -1
        data = torch.cat([form[0] for form in held], at)
        scale = torch.cat([form[1] for form in held], at)
        made.append((data, checks.laid_out(scale, data, first.block_shape)))
    if made == [None, None]:
        raise ValueError("cat of BlockwiseFP8Tensors that hold no form in common")
    return _like(first, made[0], made[1], shape)
