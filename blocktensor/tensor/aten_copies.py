"""Copies of a BlockwiseFP8Tensor, with storage of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops import checks
from ..ops.formats import Quantized
from ..ops.scale_layouts import copy_data_, empty_quantized, laid_out
from .base import only_dtype
from .fp8_tensor import BlockwiseFP8Tensor
from .module_apply import converts_a_model
from .refusals import refuse, refuse_bytes, refuse_to_pick

aten = torch.ops.aten


def _fresh(
    x: BlockwiseFP8Tensor,
    device: torch.device | None,
    dtype: torch.dtype | None,
    copy: bool,
    non_blocking: bool = False,
) -> BlockwiseFP8Tensor:
    """Storage of its own, scales included, filled from ``x`` or left uninitialised."""
    made: list[Quantized | None] = []
    for form in x.operand:
        if form is None:
            made.append(None)
            continue
        new = empty_quantized(form.data.shape, form.format, x.device if device is None else device)
        if copy:
            _copy_form(new, form, non_blocking)
        made.append(new)
    checks.gemm_output(dtype or x.dtype)
    source = None
    if x.source is not None:
        source = torch.empty_like(x.source, device=device)
        if copy:
            source.copy_(x.source, non_blocking=non_blocking)
    return BlockwiseFP8Tensor(
        *made,
        shape=x.shape,
        strides=x.stride(),
        dtype=dtype or x.dtype,
        recipe=x.recipe,
        formats=x.formats,
        source=source,
    )


def _clone(func: Any, x: BlockwiseFP8Tensor, *, memory_format: Any = None) -> BlockwiseFP8Tensor:
    return _fresh(x, None, None, copy=True)


def _to_copy(
    func: Any,
    x: BlockwiseFP8Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **others: Any,
) -> BlockwiseFP8Tensor:
    known = {"dtype": dtype, "device": device, **others}
    other = only_dtype(x, known)
    is_known = other in checks.HIGH_PRECISION
    if x.format.transposes and (is_known or (other is not None and converts_a_model())):
        return x.relabel(dtype=dtype)  # of a weight in a forward: the same bytes, never written to
    return _fresh(x, device, dtype, copy=True, non_blocking=non_blocking)


def _empty_like(
    func: Any,
    x: BlockwiseFP8Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> BlockwiseFP8Tensor:
    return _fresh(x, device, dtype, copy=False)


def _zeros_like(func: Any, x: BlockwiseFP8Tensor, **kwargs: Any) -> Tensor:
    """Plain zeros, the initial value of a gradient."""
    empty = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    zeros: Tensor = func(empty, **kwargs)
    return zeros


def _copy_(func: Any, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(source, BlockwiseFP8Tensor):
        refuse_bytes(x, source)
        refuse(func)
    if not isinstance(x, BlockwiseFP8Tensor):
        if not source.format.transposes:
            refuse(func)
        # of a weight, as the state_dict of a frozen model is loaded into a plain one
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
    if x.rowwise_data is not None:
        _copy_form(x.rowwise(), source.rowwise(), non_blocking)
    if x.columnwise_data is not None:
        _copy_form(x.columnwise(), source.columnwise(), non_blocking)
    x.source = source.source
    x.source_version = source.source_version
    return x


def _picked(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if isinstance(x, BlockwiseFP8Tensor) and x.format.transposes and x.ndim > 2:
        refuse_to_pick(func, x, ".dequantize()")
    refuse(func)


def _picked_rows(func: Any, x: Tensor, *args: Any) -> Tensor:
    """Rows of tokens in blocks of one row, with their scales."""
    is_matrix = isinstance(x, BlockwiseFP8Tensor) and x.format.rows == 1 and x.ndim == 2
    if not (is_matrix and _is_of_rows(*args)):
        _picked(func, x, *args)
    assert isinstance(x, BlockwiseFP8Tensor)
    row = x.operand.rowwise
    if row is None or x.serves_wgrad:
        raise NotImplementedError(
            f"{func} of {x!r}, whose columnwise blocks hold several rows each: index the tensor "
            f"that it was cast from, or .dequantize(), or cast rowwise alone "
            f"(BlockwiseFP8Tensor.quantize(x, columnwise=False))"
        )
    data = func(row.data.view(torch.uint8), *args).view(row.data.dtype)
    made = laid_out(data, func(row.scale, *args), row.format)
    return BlockwiseFP8Tensor(made, None, shape=data.shape, dtype=x.dtype, recipe=x.recipe)


def _is_of_rows(first: Any, *others: Any) -> bool:
    """Whether the arguments of ``index_select`` or ``index`` pick rows of a matrix."""
    if isinstance(first, int):
        return first in (0, -2)
    index, *rest = first
    return index is not None and index.ndim == 1 and not any(x is not None for x in rest)


def _copy_form(target: Quantized, source: Quantized, non_blocking: bool) -> None:
    copy_data_(target.data, source.data, non_blocking)
    target.scale.copy_(source.scale, non_blocking=non_blocking)


COPIES: dict[Any, Callable[..., Any]] = {
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty_like,
    aten.zeros_like.default: _zeros_like,
    aten.copy_.default: _copy_,
    aten.index.Tensor: _picked_rows,
    aten.index_select.default: _picked_rows,
    aten.gather.default: _picked,
}
