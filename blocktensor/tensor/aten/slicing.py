"""Cut and concatenate BlockwiseFP8Tensors: slice, split, select, cat, stack.

Cuts must lie on block boundaries. A cut along the rows of a form is a view of its bytes; a cut
along its columns is a copy, since tensor cores read contiguous rows. A 128x128 part keeps one form,
from which the other is derived. A 1x128 part keeps both forms, which are two casts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.formats import Quantized, ceil_div
from ...ops.runtime.specialize import PLAIN
from ...ops.scale_layouts import columnwise_width, laid_out
from ..base import counting_together, implements, view_of_its_kind
from ..fp8_tensor import ATEN_OPS, BlockwiseFP8Tensor
from ..operand import Operand
from ..refusals import refuse

aten = torch.ops.aten


def _part(x: BlockwiseFP8Tensor, dim: int, start: int, stop: int, op: str) -> BlockwiseFP8Tensor:
    """Cut indices ``start`` to ``stop`` along ``dim``."""
    if start == 0 and stop == x.shape[dim]:
        return x.relabel()
    shape = list(x.shape)
    shape[dim] = stop - start
    if _is_of_stack(x, dim):
        return _like(
            x, Operand(*(form and _cut(form, 0, start, stop) for form in x.operand)), shape
        )
    # the columns of one form are the rows of the other
    columns = dim == x.ndim - 1
    along, across = x.operand.transposed() if columns else x.operand
    rows = 1 if columns else math.prod(x.shape[dim + 1 : -1])  # elements for an index
    if across is not None or (along is not None and along.format.rows > 1):
        for index in (start, stop):
            _check_boundary(x, dim, index, max(rows, 1), op)
    start, stop = start * rows, stop * rows
    if along is not None and x.format.transposes:
        across = None
    operand = Operand(
        along and _cut(along, -2, start, stop), across and _cut(across, -1, start, stop)
    )
    return _like(x, operand.transposed() if columns else operand, shape)


def _check_boundary(x: BlockwiseFP8Tensor, dim: int, index: int, rows: int, op: str) -> None:
    """Refuse a cut through a block."""
    size, block = x.shape[dim], x.format.cols
    if index != size and index * rows % block:
        step = block // math.gcd(block, rows)
        below = index // step * step
        raise ValueError(
            f"{op} of a BlockwiseFP8Tensor {list(x.shape)} at index {index} of dimension {dim} "
            f"cuts through a block of {block}: the nearest boundaries are {below} and "
            f"{min(below + step, size)}; call .dequantize() first to cut elsewhere"
        )


def _cut(form: Quantized, axis: int, start: int, stop: int) -> Quantized:
    """Cut a form along the columns (-1) or rows (-2) of its data, or out of a stack (0)."""
    data, scale, format = form
    block = format.block_shape[axis] if axis else 1
    with counting_together(data):
        scale = aten.slice(scale, axis, start // block, ceil_div(stop, block))
        if axis != -1:
            return Quantized(aten.slice(data, axis, start, stop), scale, format)
    end = columnwise_width(stop, format) if start < stop else stop  # with the zeros
    if type(scale) in PLAIN:  # bytes that are copied keep their scales when the whole is written
        scale = scale.clone()
    return laid_out(data[..., start:end].contiguous(), scale, format)


def _like(x: BlockwiseFP8Tensor, operand: Operand, shape: Sequence[int]) -> BlockwiseFP8Tensor:
    strides = None
    if not x.is_contiguous():  # strides as the transpose would have them
        *lead, n, k = torch.empty((*shape[:-2], shape[-1], shape[-2]), device="meta").stride()
        strides = [*lead, k, n]
    made = x.like(operand, shape, strides)
    made.generation = x.generation  # a part may view bytes that FSDP2 overwrites in its next gather
    return made


def _dim(x: BlockwiseFP8Tensor, dim: int, op: str) -> int:
    """Return ``dim`` counted from 0; refuse a dimension that cannot be cut."""
    if not -x.ndim <= dim < x.ndim:
        raise IndexError(f"{op}: dimension {dim} of a tensor with {x.ndim}")
    dim %= x.ndim
    if 0 < dim < x.ndim - 1 and not x.format.transposes:  # shapes are [N, K] or [E, N, K]
        raise NotImplementedError(
            f"{op} along dimension {dim} of a BlockwiseFP8Tensor {list(x.shape)}: its bytes are a "
            f"matrix of the last dimension by all others, which can be cut along the first "
            f"dimension and the last; call .dequantize() first"
        )
    return dim


def _is_of_stack(x: BlockwiseFP8Tensor, dim: int) -> bool:
    """Return True if matrices of a stack lie along ``dim``."""
    return x.format.transposes and dim < x.ndim - 2


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
    if not x.format.transposes:
        return part.relabel(shape=part.shape[1:])
    return _like(x, Operand(*(form and _first(form) for form in part.operand)), part.shape[1:])


def _first(stack: Quantized) -> Quantized:
    with counting_together(stack.data):
        return Quantized(stack.data[0], stack.scale[0], stack.format)


@implements(ATEN_OPS, aten.unbind.int)
@view_of_its_kind
def _unbind(func: Any, x: BlockwiseFP8Tensor, dim: int = 0) -> list[BlockwiseFP8Tensor]:
    return [_select(aten.select.int, x, dim, i) for i in range(x.shape[_dim(x, dim, "unbind")])]


@implements(ATEN_OPS, aten.split.Tensor, aten.split_with_sizes.default)
@view_of_its_kind
def _split(
    func: Any, x: BlockwiseFP8Tensor, sizes: int | list[int], dim: int = 0
) -> list[BlockwiseFP8Tensor]:
    dim = _dim(x, dim, "split")
    total = x.shape[dim]
    if not isinstance(sizes, list):
        if sizes < 1:
            raise ValueError(f"split into parts of {sizes}: expected at least 1")
        sizes = [min(sizes, total - at) for at in range(0, max(total, 1), sizes)]
    if sum(sizes) != total:
        raise ValueError(f"split into {sizes}: expected a sum of {total}")
    ends = itertools.accumulate(sizes)
    return [_part(x, dim, end - size, end, "split") for end, size in zip(ends, sizes, strict=True)]


@implements(ATEN_OPS, aten.cat.default)
def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> BlockwiseFP8Tensor:
    fp8 = [x for x in tensors if isinstance(x, BlockwiseFP8Tensor)]
    kinds = {(x.formats, x.dtype, x.ndim, x.is_contiguous()) for x in fp8}
    if len(fp8) < len(tensors) or len(kinds) > 1:
        found = ", ".join(
            repr(x) if isinstance(x, BlockwiseFP8Tensor) else f"a {x.dtype} tensor" for x in tensors
        )
        raise TypeError(
            f"cat of {found}: expected BlockwiseFP8Tensors of one block_shape, dtype and scale "
            f"rounding; call .dequantize() first"
        )
    first = fp8[0]
    dim = _dim(first, dim, "cat")
    if len({(*x.shape[:dim], *x.shape[dim + 1 :]) for x in fp8}) > 1:
        raise ValueError(f"cat along {dim} of shapes {[list(x.shape) for x in fp8]}")
    shape = list(first.shape)
    shape[dim] = sum(x.shape[dim] for x in fp8)
    columns, stack = dim == first.ndim - 1, _is_of_stack(first, dim)
    rows = 1 if columns else math.prod(first.shape[dim + 1 : -1])
    across = any(x.operand[0 if columns else 1] is not None for x in fp8)
    squares = any(form.format.rows > 1 for x in fp8 for form in x.operand if form is not None)
    block = first.format.cols
    for x in fp8[:-1]:
        if (squares or across) and not stack and x.shape[dim] * rows % block:
            raise ValueError(
                f"cat along {dim}: {list(x.shape)} ends inside a block of {block}, and only the "
                f"last part may; call .dequantize() first"
            )
    forms: list[Quantized | None] = []
    for side in (0, 1):
        own = [form for x in fp8 if (form := x.operand[side]) is not None]
        if len(own) < len(fp8):
            forms.append(None)
            continue
        at = 0 if stack else -2 if (side == 1) == columns else -1
        width = min(form.data.shape[-1] for form in own)  # some may have zeros at the end
        parts = [form.data if at == -1 else form.data[..., :width] for form in own]
        scale = torch.cat([form.scale for form in own], at)
        forms.append(laid_out(torch.cat(parts, at), scale, first.formats[side]))
    if forms == [None, None]:
        raise ValueError("cat of BlockwiseFP8Tensors that hold no form in common")
    return _like(first, Operand(*forms), shape)


@implements(ATEN_OPS, aten.stack.default)
def _stack(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> BlockwiseFP8Tensor:
    if dim not in (0, -tensors[0].ndim - 1):
        refuse(func)
    return _cat(aten.cat.default, [x.unsqueeze(0) for x in tensors])
