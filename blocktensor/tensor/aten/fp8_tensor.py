"""View and copy BlockwiseFP8Tensors.

A view has the same bytes with another shape or orientation; a copy has its own storage.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import canonicalize_dims
from torch.utils._python_dispatch import transform_subclass

from ...ops import checks
from ...ops.formats import Quantized
from ...ops.runtime.specialize import PLAIN
from ...ops.scale_layouts import copy_data_, empty_quantized, laid_out
from ..base import count_write, counting_together, implements, only_dtype, view_of_its_kind
from ..compat.sent_frozen import Bucket
from ..fp8_tensor import ATEN_OPS, BlockwiseFP8Tensor
from ..late_copy import is_read_at_once
from ..operand import Operand
from ..refusals import refuse, refuse_bytes
from ..torch_internals.callers import converts_a_model

aten = torch.ops.aten


@implements(ATEN_OPS, aten.detach.default, aten.alias.default)
@view_of_its_kind
def _alias(func: Any, x: BlockwiseFP8Tensor) -> BlockwiseFP8Tensor:
    return x.relabel()


@implements(ATEN_OPS, aten.t.default)
@view_of_its_kind
def _t(func: Any, x: BlockwiseFP8Tensor) -> BlockwiseFP8Tensor:
    if x.ndim != 2:
        refuse(func)
    return _permuted(x, [1, 0], "t()")


@implements(ATEN_OPS, aten.transpose.int)
@view_of_its_kind
def _transpose(func: Any, x: BlockwiseFP8Tensor, dim0: int, dim1: int) -> BlockwiseFP8Tensor:
    order = list(range(x.ndim))
    first, second = canonicalize_dims(x.ndim, (dim0, dim1))
    order[first], order[second] = second, first
    return _permuted(x, order, f"transpose({dim0}, {dim1})")


@implements(ATEN_OPS, aten.permute.default)
@view_of_its_kind
def _permute(func: Any, x: BlockwiseFP8Tensor, dims: list[int]) -> BlockwiseFP8Tensor:
    return _permuted(x, list(canonicalize_dims(x.ndim, dims)), f"permute({dims})")


def _permuted(x: BlockwiseFP8Tensor, order: list[int], call: str) -> BlockwiseFP8Tensor:
    same = list(range(x.ndim))
    if order == same:
        return x.relabel()
    held_flat = x.format.rows == 1 and x.ndim != 2
    if order != [*same[:-2], *same[:-3:-1]] or held_flat:
        raise NotImplementedError(
            f"{call} of a BlockwiseFP8Tensor {list(x.shape)}: FP8 blocks can swap only the last "
            f"two dimensions of a matrix (or stack of 128x128-block matrices); call .dequantize() "
            f"first"
        )
    shape, strides = ([each[d] for d in order] for each in (x.shape, x.stride()))
    return x.relabel(shape=shape, strides=strides, transpose=True)


@implements(ATEN_OPS, aten.view.default, aten._unsafe_view.default, aten.reshape.default)
@view_of_its_kind
def _reshape(func: Any, x: BlockwiseFP8Tensor, size: list[int]) -> Tensor:
    shape = _infer(list(size), x)
    if x.format.transposes and len(shape) == 1:
        return Bucket.of(x)  # DDP flattens weights to send them to other ranks
    if shape == list(x.shape):
        return x.relabel()
    if x.format.transposes:
        return _restacked(x, shape)
    if not x.is_contiguous() or shape[-1:] != [x.shape[-1]]:
        raise NotImplementedError(
            f"cannot view a BlockwiseFP8Tensor {list(x.shape)} in blocks of {x.block_shape} as "
            f"{list(size)}: only the leading dimensions of 1x128 blocks can change, the last one "
            f"holds the blocks; call .dequantize() first"
        )
    return x.relabel(shape=shape)


@implements(ATEN_OPS, aten.unsqueeze.default)
@view_of_its_kind
def _unsqueeze(func: Any, x: BlockwiseFP8Tensor, dim: int) -> Tensor:
    if dim not in (0, -x.ndim - 1):
        refuse(func)
    return _reshape(func, x, [1, *x.shape])


def _restacked(x: BlockwiseFP8Tensor, shape: list[int]) -> BlockwiseFP8Tensor:
    """View the rows of a weight as other matrices, which all begin at block boundaries."""
    block = x.format.rows
    cuts = [s[-2] for s in (list(x.shape), shape) if len(s) == 3 and s[0] != 1]
    keeps_columns = len(shape) in (2, 3) and shape[-1] == x.shape[-1]
    if not keeps_columns or any(rows % block for rows in cuts):
        raise NotImplementedError(
            f"cannot view an FP8 weight {list(x.shape)} without a master, in blocks of "
            f"{x.block_shape}, as {shape}: its rows can become the rows of matrices [N, K] of a "
            f"stack [E, N, K] where N is a multiple of {block}. To view it otherwise, call "
            f"blocktensor.unfreeze(module) before any fully_shard: views of a weight with a master "
            f"have blocks of their own. Or call .dequantize() first"
        )
    row = x.rowwise()
    *lead, rows, cols = x.format.scale_shape(shape)
    with counting_together(row.data):
        scale = row.scale.reshape(math.prod(lead) * rows, cols)
        if lead:  # still a view; torch's view with one row in each matrix has other strides
            step = scale.stride(0)
            scale = scale.as_strided((*lead, rows, cols), (rows * step, step, 1))
        form = laid_out(row.data.view(shape), scale, row.format)
    stack = x.like(Operand(form, None), shape, None)
    stack.generation = x.generation
    return stack


def _infer(size: list[int], x: Tensor) -> list[int]:
    if -1 in size:
        known = math.prod(s for s in size if s != -1)
        size[size.index(-1)] = x.numel() // known if known else 0
    if math.prod(size) != x.numel():
        raise ValueError(f"shape {size} is invalid for a tensor of {x.numel()} elements")
    return size


@implements(ATEN_OPS, aten.as_strided.default)
@view_of_its_kind
def _as_strided(
    func: Any, x: BlockwiseFP8Tensor, size: list[int], stride: list[int], offset: int | None = None
) -> BlockwiseFP8Tensor:
    if (tuple(size), tuple(stride), offset or 0) != (tuple(x.shape), x.stride(), 0):
        refuse(func)
    return x.relabel()  # FSDP calls as_strided on a gathered weight


def _fresh(x: BlockwiseFP8Tensor, device: Any, dtype: Any) -> BlockwiseFP8Tensor:
    """Return uninitialised storage for the forms of ``x``, scales included."""
    if dtype is not None:
        checks.given_dtype(dtype, "dtype")
    place = x.device if device is None else device
    forms = (form and empty_quantized(form.data.shape, form.format, place) for form in x.operand)
    source = None if x.source is None else torch.empty_like(x.source, device=device)
    return x.like(Operand(*forms), x.shape, x.stride(), dtype=dtype or x.dtype, source=source)


def _fill(made: BlockwiseFP8Tensor, x: BlockwiseFP8Tensor, non_blocking: bool) -> None:
    """Copy the bytes of ``x``; derive a form that it does not hold."""
    if made.rowwise_data is not None:
        _copy_form(made.rowwise(), x.rowwise(), non_blocking)
    if made.columnwise_data is not None:
        _copy_form(made.columnwise(), x.columnwise(), non_blocking)


def _copied(
    x: BlockwiseFP8Tensor, device: Any = None, dtype: Any = None, non_blocking: bool = False
) -> BlockwiseFP8Tensor:
    made = _fresh(x, device, dtype)
    _fill(made, x, non_blocking)
    if made.source is not None and x.source is not None:
        made.source.copy_(x.source, non_blocking=non_blocking)
    return made


@implements(ATEN_OPS, aten.clone.default)
def _clone(func: Any, x: BlockwiseFP8Tensor, *, memory_format: Any = None) -> BlockwiseFP8Tensor:
    return _copied(x)


@implements(ATEN_OPS, aten._pin_memory.default)
def _pin_memory(func: Any, x: BlockwiseFP8Tensor, *device: Any) -> BlockwiseFP8Tensor:
    made: BlockwiseFP8Tensor = transform_subclass(x, lambda name, part: func(part, *device))
    return made


@implements(ATEN_OPS, aten.is_pinned.default)
def _is_pinned(func: Any, x: BlockwiseFP8Tensor, *device: Any) -> bool:
    return all(func(form.data, *device) for form in _forms(x))


@implements(ATEN_OPS, aten._to_copy.default)
def _to_copy(
    func: Any,
    x: BlockwiseFP8Tensor,
    *,
    dtype: Any = None,
    device: Any = None,
    non_blocking: bool = False,
    **others: Any,
) -> BlockwiseFP8Tensor:
    other = only_dtype(x, {"dtype": dtype, "device": device, **others})
    is_known = other in checks.HIGH_PRECISION
    if x.format.transposes and (is_known or (other is not None and converts_a_model())):
        is_traced = type(_forms(x)[0].data) not in PLAIN  # the graph may return the copy
        is_read = not is_traced and is_read_at_once(x)
        return (x if is_read else _copied(x)).relabel(dtype=dtype)
    return _copied(x, device, dtype, non_blocking)


@implements(ATEN_OPS, aten.empty_like.default)
def _empty_like(
    func: Any, x: BlockwiseFP8Tensor, *, dtype: Any = None, device: Any = None, **_: Any
) -> BlockwiseFP8Tensor:
    return _fresh(x, device, dtype)


@implements(ATEN_OPS, aten.zeros_like.default)
def _zeros_like(func: Any, x: BlockwiseFP8Tensor, **kwargs: Any) -> Tensor:
    """Return plain zeros, the initial value of a gradient."""
    empty = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    zeros: Tensor = func(empty, **kwargs)
    return zeros


@implements(ATEN_OPS, aten.copy_.default)
def _copy_(func: Any, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(source, BlockwiseFP8Tensor):
        refuse_bytes(x, source)
        refuse(func)
    if not isinstance(x, BlockwiseFP8Tensor):
        if not source.format.transposes:
            refuse(func)
        # a weight: the state_dict of a frozen model is loaded into a plain one
        dtype = x.dtype if x.dtype in checks.HIGH_PRECISION else source.dtype
        with torch.no_grad():
            copied: Tensor = func(x, source.dequantize(dtype), non_blocking)
        return copied
    if x.shape != source.shape or x.formats != source.formats:
        raise ValueError(
            f"copy_ between BlockwiseFP8Tensors needs one shape, block_shape and scale rounding: "
            f"got {source!r} for {x!r}; convert both models with one recipe, or copy "
            f"source.dequantize()"
        )
    base = x._base
    if isinstance(base, BlockwiseFP8Tensor) and not _storages(base) <= _storages(x):
        raise NotImplementedError(
            f"copy_ into a part {list(x.shape)} of a BlockwiseFP8Tensor {list(base.shape)}: the "
            f"part does not share all of its bytes (columns never do; rows do where only the "
            f"rowwise form is held), so some would keep old values; copy into the whole tensor"
        )
    _fill(x, source, non_blocking)
    count_write(*(part for form in _forms(x) for part in form[:2]))
    x.source = source.source
    x.source_version = source.source_version
    return x


def _storages(x: BlockwiseFP8Tensor) -> set[int]:
    return {form.data.untyped_storage()._cdata for form in _forms(x)}


def _forms(x: BlockwiseFP8Tensor) -> list[Quantized]:
    """Return the forms that a tensor holds."""
    return [form for form in x.operand if form is not None]


def _copy_form(target: Quantized, source: Quantized, non_blocking: bool) -> None:
    copy_data_(target.data, source.data, non_blocking)
    target.scale.copy_(source.scale, non_blocking=non_blocking)
