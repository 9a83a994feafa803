"""What each aten op does on the two FP8 types.

``ATEN_OPS`` (BlockwiseFP8Tensor): the ops that stay in FP8; everything else is refused, loudly.
``WEIGHT_OPS`` (BlockwiseFP8Weight): the ops that are not simply the master's. The overrides above
autograd (linear, matmul, …) are in ``overrides.py``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .ops import checks
from .ops.layouts import ROWWISE_BLOCK, Form, empty_rowwise_form, empty_square_form
from .tensor import ATEN_OPS, BlockwiseFP8Tensor, FP8Type, refuse, scaled_mm
from .weight import WEIGHT_OPS, BlockwiseFP8Weight, FP8Cache, on_master

aten = torch.ops.aten


def view_of_its_kind(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """A view has its base's kind: under inference_mode, views of normal tensors stay normal."""

    @functools.wraps(implementation)
    def run(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled() == x.is_inference():
            return implementation(func, x, *args, **kwargs)
        with torch.inference_mode(x.is_inference()):
            return implementation(func, x, *args, **kwargs)

    return run


def implements(table: dict[Any, Callable[..., Any]], *ops: Any) -> Callable[[Any], Any]:
    """Enter what is decorated into a table, for each of ``ops``."""

    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            table[op] = implementation
        return implementation

    return register


# Products, shared by both types


def _fp8(x: Tensor) -> BlockwiseFP8Tensor | None:
    if isinstance(x, BlockwiseFP8Weight):
        return x.quantized()
    return x if isinstance(x, BlockwiseFP8Tensor) else None


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b`` below autograd, where at least one operand is FP8; the other is cast 1x128."""
    left, right = _fp8(a), _fp8(b)
    known = left if right is None else right
    assert known is not None
    if left is None:
        left = BlockwiseFP8Tensor.quantize(a, recipe=known.recipe, columnwise=False)
    if right is None:
        right = BlockwiseFP8Tensor.quantize(b, recipe=known.recipe, rowwise=False)
    return scaled_mm(left, right, bias=bias, out_dtype=a.dtype)


def _refuse_untracked(func: Any, *operands: Tensor) -> None:
    """A weight that reaches an aten product under autograd would get a high-precision gradient."""
    if torch.is_grad_enabled() and any(
        isinstance(x, BlockwiseFP8Weight) and x.requires_grad for x in operands
    ):
        raise NotImplementedError(
            f"{func} reached a BlockwiseFP8Weight below F.linear, torch.mm, torch.matmul and "
            f"torch.addmm, where its gradient would silently be computed in high precision: call "
            f"one of those, or leave this module unconverted (skip=[...])"
        )


@implements(ATEN_OPS, aten.mm.default)
@implements(WEIGHT_OPS, aten.mm.default)
def _mm(func: Any, a: Tensor, b: Tensor) -> Tensor:
    _refuse_untracked(func, a, b)
    return _product(a, b)


@implements(ATEN_OPS, aten.addmm.default)
@implements(WEIGHT_OPS, aten.addmm.default)
def _addmm(
    func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    if isinstance(bias, FP8Type):
        refuse(func)
    _refuse_untracked(func, a, b)
    if bias.ndim == 1 and beta == 1 and alpha == 1:
        return _product(a, b, bias)
    return _product(a, b).mul_(alpha).add_(bias, alpha=beta)


@implements(
    WEIGHT_OPS,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.addbmm.default,
    aten.mv.default,
    aten.addmv.default,
    aten.addmm_.default,
    aten.addr.default,
    aten.dot.default,
    aten.vdot.default,
    aten._grouped_mm.default,
    aten._trilinear.default,
    aten.convolution.default,
)
def _unsupported_product(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        f"{func} has no FP8 path for BlockwiseFP8Weight yet, and falling back to high precision "
        f"would be silent: use F.linear, torch.mm, torch.matmul or torch.addmm, or pass "
        f"weight.master to compute in high precision on purpose"
    )


# BlockwiseFP8Tensor: relabelling


@implements(ATEN_OPS, aten.detach.default, aten.alias.default)
@view_of_its_kind
def _alias(func: Any, x: BlockwiseFP8Tensor) -> BlockwiseFP8Tensor:
    return x.relabel()


@implements(ATEN_OPS, aten.t.default)
@view_of_its_kind
def _t(func: Any, x: BlockwiseFP8Tensor) -> BlockwiseFP8Tensor:
    if x.ndim != 2:
        refuse(func)
    return _swap_last(x)


@implements(ATEN_OPS, aten.transpose.int)
@view_of_its_kind
def _transpose(func: Any, x: BlockwiseFP8Tensor, dim0: int, dim1: int) -> BlockwiseFP8Tensor:
    dims = {dim0 % x.ndim, dim1 % x.ndim}
    if len(dims) == 1:
        return x.relabel()
    held_flat = x.block_shape == ROWWISE_BLOCK and x.ndim != 2
    if dims != {x.ndim - 2, x.ndim - 1} or held_flat:
        raise NotImplementedError(
            f"transpose({dim0}, {dim1}) of a BlockwiseFP8Tensor {list(x.shape)}: FP8 blocks can "
            f"swap only the last two dimensions of a matrix (or stack of 128x128-block matrices); "
            f"call .dequantize() first"
        )
    return _swap_last(x)


@implements(ATEN_OPS, aten.permute.default)  # x.T
@view_of_its_kind
def _permute(func: Any, x: BlockwiseFP8Tensor, dims: list[int]) -> BlockwiseFP8Tensor:
    if [d % x.ndim for d in dims] != [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2]:
        raise NotImplementedError(
            f"permute({dims}) of a BlockwiseFP8Tensor {list(x.shape)}: FP8 blocks can swap only "
            f"the last two dimensions; call .dequantize() first"
        )
    return _transpose(func, x, -2, -1)


def _swap_last(x: BlockwiseFP8Tensor) -> BlockwiseFP8Tensor:
    shape, strides = list(x.shape), list(x.stride())
    shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
    return x.relabel(shape=shape, strides=strides, transpose=True)


@implements(ATEN_OPS, aten.view.default, aten._unsafe_view.default, aten.reshape.default)
@view_of_its_kind
def _reshape(func: Any, x: BlockwiseFP8Tensor, size: list[int]) -> BlockwiseFP8Tensor:
    shape = _infer(list(size), x)
    leading_only = (
        x.block_shape == ROWWISE_BLOCK and x.is_contiguous() and shape[-1:] == [x.shape[-1]]
    )
    if shape != list(x.shape) and not leading_only:
        raise NotImplementedError(
            f"cannot view a BlockwiseFP8Tensor {list(x.shape)} in blocks of {x.block_shape} as "
            f"{list(size)}: only the leading dimensions of 1x128 blocks can change, the last one "
            f"holds the blocks; call .dequantize() first"
        )
    return x.relabel(shape=shape)


def _infer(size: list[int], x: Tensor) -> list[int]:
    if -1 in size:
        known = math.prod(s for s in size if s != -1)
        size[size.index(-1)] = x.numel() // known if known else 0
    if math.prod(size) != x.numel():
        raise ValueError(f"shape {size} is invalid for a tensor of {x.numel()} elements")
    return size


# BlockwiseFP8Tensor: copies


def _empty_form(x: BlockwiseFP8Tensor, form: Form, device: torch.device) -> Form:
    shape = form[0].shape
    if x.block_shape == ROWWISE_BLOCK:
        return empty_rowwise_form(shape[0], shape[1], device)
    return empty_square_form(shape, device)


def _fresh(
    x: BlockwiseFP8Tensor,
    device: torch.device | None,
    dtype: torch.dtype | None,
    copy: bool,
    non_blocking: bool = False,
) -> BlockwiseFP8Tensor:
    """Storage of its own, scales included, filled from ``x`` or left uninitialised."""
    made: list[Form | None] = []
    for form in x.forms():
        if form is None:
            made.append(None)
            continue
        new = _empty_form(x, form, x.device if device is None else device)
        if copy:
            for target, source in zip(new, form, strict=True):
                target.copy_(source, non_blocking=non_blocking)
        made.append(new)
    checks.gemm_output(dtype or x.dtype)
    return BlockwiseFP8Tensor(
        made[0],
        made[1],
        shape=x.shape,
        strides=x.stride(),
        dtype=dtype or x.dtype,
        block_shape=x.block_shape,
        recipe=x.recipe,
    )


@implements(ATEN_OPS, aten.clone.default)
def _clone(func: Any, x: BlockwiseFP8Tensor, *, memory_format: Any = None) -> BlockwiseFP8Tensor:
    return _fresh(x, None, None, copy=True)


@implements(ATEN_OPS, aten._to_copy.default)
def _to_copy(
    func: Any,
    x: BlockwiseFP8Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **_: Any,
) -> BlockwiseFP8Tensor:
    return _fresh(x, device, dtype, copy=True, non_blocking=non_blocking)


@implements(ATEN_OPS, aten.empty_like.default)
def _empty_like(
    func: Any,
    x: BlockwiseFP8Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> BlockwiseFP8Tensor:
    return _fresh(x, device, dtype, copy=False)


@implements(ATEN_OPS, aten.as_strided.default)
@view_of_its_kind
def _as_strided(
    func: Any, x: BlockwiseFP8Tensor, size: list[int], stride: list[int], offset: int | None = None
) -> BlockwiseFP8Tensor:
    if (tuple(size), tuple(stride), offset or 0) != (tuple(x.shape), x.stride(), 0):
        refuse(func)
    return x.relabel()  # as FSDP lays out a weight that it has gathered


@implements(ATEN_OPS, aten.zeros_like.default)
def _zeros_like(func: Any, x: BlockwiseFP8Tensor, **kwargs: Any) -> Tensor:
    """Plain zeros: what a gradient begins as."""
    empty = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    zeros: Tensor = func(empty, **kwargs)
    return zeros


@implements(ATEN_OPS, aten.copy_.default)
def _copy_(func: Any, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not (isinstance(x, BlockwiseFP8Tensor) and isinstance(source, BlockwiseFP8Tensor)):
        refuse(func)
    same = (x.shape, x.block_shape, x.recipe.scale) == (
        source.shape,
        source.block_shape,
        source.recipe.scale,
    )
    if not same:
        raise ValueError(
            f"copy_ between BlockwiseFP8Tensors needs one shape, block_shape and scale rounding: "
            f"got {source!r} for {x!r}"
        )
    if x.rowwise_data is not None:
        _copy_form(x.rowwise(), source.rowwise(), non_blocking)
    if x.columnwise_data is not None:
        _copy_form(x.columnwise(), source.columnwise(), non_blocking)
    return x


def _copy_form(target: Form, source: Form, non_blocking: bool) -> None:
    for t, s in zip(target, source, strict=True):
        t.copy_(s, non_blocking=non_blocking)


# BlockwiseFP8Weight: views and copies that stay weights


@implements(WEIGHT_OPS, aten.detach.default, aten.alias.default)
@view_of_its_kind
def _weight_alias(func: Any, w: BlockwiseFP8Weight) -> BlockwiseFP8Weight:
    return BlockwiseFP8Weight(w.master, cache=w.cache, transposed=w.transposed)


@implements(WEIGHT_OPS, aten.t.default)
@view_of_its_kind
def _weight_t(func: Any, w: BlockwiseFP8Weight) -> BlockwiseFP8Weight:
    return BlockwiseFP8Weight(w.master.t(), cache=w.cache, transposed=not w.transposed)


@implements(WEIGHT_OPS, aten.transpose.int)
@view_of_its_kind
def _weight_transpose(func: Any, w: BlockwiseFP8Weight, dim0: int, dim1: int) -> Tensor:
    if {dim0 % w.ndim, dim1 % w.ndim} != {w.ndim - 2, w.ndim - 1}:
        return on_master(func, (w, dim0, dim1), {})
    master = w.master.transpose(-1, -2)
    return BlockwiseFP8Weight(master, cache=w.cache, transposed=not w.transposed)


@implements(WEIGHT_OPS, aten.permute.default)  # w.T
@view_of_its_kind
def _weight_permute(func: Any, w: BlockwiseFP8Weight, dims: list[int]) -> Tensor:
    last_two_swapped = [*range(w.ndim - 2), w.ndim - 1, w.ndim - 2]
    if [d % w.ndim for d in dims] != last_two_swapped:
        return on_master(func, (w, dims), {})
    return _weight_transpose(func, w, -1, -2)


@implements(WEIGHT_OPS, aten.clone.default, aten._to_copy.default, aten.empty_like.default)
def _weight_copy(func: Any, w: BlockwiseFP8Weight, **kwargs: Any) -> Tensor:
    master = func(w.master, **kwargs)
    if master.dtype not in checks.HIGH_PRECISION:
        return master
    cache = FP8Cache(master.transpose(-1, -2) if w.transposed else master, w.recipe)
    return BlockwiseFP8Weight(master, cache=cache, transposed=w.transposed)
