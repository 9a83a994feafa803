"""View, copy and concatenate BlockwiseFP8Weights, with weights as results.

Other ops act on the master.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ...ops import checks
from ...ops.runtime.specialize import PLAIN
from ..base import (
    FP8Base,
    counting_together,
    implements,
    on_master,
    only_dtype,
    view_of_its_kind,
)
from ..late_copy import LateCopy, is_read_at_once
from ..refusals import refuse_bytes, refuse_to_pick
from ..torch_internals.aot_autograd import share_storage
from ..torch_internals.callers import converts_a_model
from ..weight import WEIGHT_OPS, BlockwiseFP8Weight
from ..weight_cache import FP8Cache

aten = torch.ops.aten

_RANKS = (2, 3)
"""Ranks of weights: matrices and stacks of them."""


def _view(*ops: Any) -> Callable[..., Any]:
    """Enter a view op: views get the type of their weight and, for compilers, its storage."""

    def enter(implementation: Callable[..., Any]) -> Callable[..., Any]:
        of_its_kind = view_of_its_kind(implementation)

        @functools.wraps(implementation)
        def run(func: Any, w: BlockwiseFP8Weight, *args: Any, **kwargs: Any) -> Any:
            views = of_its_kind(func, w, *args, **kwargs)
            if not isinstance(w._late, LateCopy):  # a late copy gets its memory when it is read
                share_storage(views, w)
            return views

        implements(WEIGHT_OPS, *ops)(run)
        return run

    return enter


@_view(aten.detach.default, aten.alias.default)
def _alias(func: Any, w: BlockwiseFP8Weight) -> BlockwiseFP8Weight:
    master = w.master  # a late copy is made here, since its memory is handed out
    return BlockwiseFP8Weight(master, cache=w.cache, transposed=w.transposed)


@_view(
    aten.permute.default,  # permute: w.T
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.as_strided.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unfold.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
def _part(func: Any, w: BlockwiseFP8Weight, *args: Any, **kwargs: Any) -> Any:
    """View a part of a weight: matrices and stacks are weights, with their own grid of blocks."""
    copy = w._late
    # as_strided takes a place in memory, where the source lies elsewhere than the copy
    if isinstance(copy, LateCopy) and func is not aten.as_strided.default:
        views = func(w._oriented(copy.source.master), *args, **kwargs)
        if all(view.ndim in _RANKS for view in tree_leaves(views)):
            return _late_parts(func, w, copy, views, args, kwargs)
    master = w.master
    with counting_together(master):
        views = func(master, *args, **kwargs)
    return tree_map(lambda view: _as_weight(view, w), views)


@_view(aten.t.default, aten.transpose.int)
def _transpose(func: Any, w: BlockwiseFP8Weight, *dims: int) -> Any:
    """Transpose a weight, without comparing layouts: experts do it in every step."""
    rank = w.ndim
    swaps = not dims or {dim % rank for dim in dims} == {rank - 2, rank - 1}
    if not swaps or isinstance(w._late, LateCopy):
        return _part(func, w, *dims)
    with counting_together(w.master):
        view = func(w.master, *dims)
    return BlockwiseFP8Weight(view, cache=w.cache, transposed=not w.transposed)


def _as_weight(view: Tensor, w: BlockwiseFP8Weight) -> Tensor:
    """Return a view of the master as a weight, which shares the cache if it views the whole."""
    if view.ndim not in _RANKS:
        # autograd makes a view of this one, and wants none that it has made before
        return view.detach() if type(view) in PLAIN else view
    if _layout(view) == _layout(w.master):
        return BlockwiseFP8Weight(w.master, cache=w.cache, transposed=w.transposed)
    if _layout(view) == _layout(w.master, swap=True):
        return BlockwiseFP8Weight(view, cache=w.cache, transposed=not w.transposed)
    return BlockwiseFP8Weight(view, cache=FP8Cache(view, w.recipe, counted=w._counted))


def _layout(x: Tensor, swap: bool = False) -> tuple[Any, ...]:
    """Return the shape, strides and offset of a view; with ``swap``, of its transpose."""
    shape, strides = [*x.shape], [*x.stride()]
    if swap:
        shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
    return shape, strides, x.storage_offset()


def _late(copy: LateCopy, transposed: bool) -> BlockwiseFP8Weight:
    like = copy.source.master  # a copy is laid out as its dense source
    like = like.transpose(-1, -2) if transposed else like
    made = BlockwiseFP8Weight._of_late_copy(like, copy, transposed)
    if transposed and type(like) not in PLAIN:
        made._traced = copy.values().transpose(-1, -2)
    return made


def _late_parts(
    func: Any, w: BlockwiseFP8Weight, copy: LateCopy, views: Any, args: Any, kwargs: Any
) -> Any:
    """Return views of a late copy, without making it, given the same ``views`` of the weight."""
    leaves, structure = tree_flatten(views)
    source = w._oriented(copy.source.master)

    def part(index: int, view: Tensor) -> BlockwiseFP8Weight:
        def cut(values: Tensor) -> Tensor:
            of_part: Tensor = tree_leaves(func(w._oriented(values), *args, **kwargs))[index]
            return of_part

        if _layout(view) == _layout(source):
            return _late(copy, w.transposed)
        if _layout(view) == _layout(source, swap=True):
            return _late(copy, not w.transposed)
        cache = FP8Cache(view, w.recipe, counted=copy.source.counted)
        return _late(LateCopy(cache, copy.dtype, copy, cut), False)

    return structure.unflatten([part(i, view) for i, view in enumerate(leaves)])


@_view(aten.select.int)
def _select(func: Any, w: BlockwiseFP8Weight, dim: int, index: int) -> Tensor:
    is_matrix = w.ndim == 3 and dim in (0, -3) and type(index) is int
    return _matrix(w, index) if is_matrix else _part(func, w, dim, index)


@_view(aten.unbind.int)
def _unbind(func: Any, w: BlockwiseFP8Weight, dim: int = 0) -> list[Tensor]:
    if w.ndim == 3 and dim in (0, -3):
        return [_matrix(w, i) for i in range(w.shape[0])]
    parts: list[Tensor] = _part(func, w, dim)
    return parts


def _matrix(w: BlockwiseFP8Weight, index: int) -> Tensor:
    """Return a matrix of a stack; all its views share one cache, and so do microbatches."""
    count = w.shape[0]
    if not -count <= index < count:
        raise IndexError(f"index {index} of a stack of {count} matrices")
    own = int(index % count)  # a graph for any sizes has symbols here
    if isinstance(w._late, LateCopy):
        return _late(w._late.part(own), w.transposed)
    cache = w.cache.part(own)
    with counting_together(w.master):
        view = w.master[index]
    return BlockwiseFP8Weight(view, cache=cache, transposed=w.transposed)


@implements(WEIGHT_OPS, aten.index.Tensor, aten.index_select.default, aten.gather.default)
def _picked(func: Any, w: BlockwiseFP8Weight, *args: Any, **kwargs: Any) -> Tensor:
    """Select rows of a matrix, as an embedding does; refuse to select matrices of a stack."""
    out: Tensor = on_master(func, (w, *args), kwargs)
    if w.ndim > 2 and out.ndim > 1:
        refuse_to_pick(func, w, ".high_precision()")
    return out


@implements(WEIGHT_OPS, aten.cat.default, aten.stack.default)
def _joined(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    out = on_master(func, (tensors, dim), {})
    weights = [x for x in tensors if isinstance(x, BlockwiseFP8Weight)]
    if len(weights) < len(tensors) or out.ndim not in _RANKS:
        return out
    if out.dtype not in checks.HIGH_PRECISION or len({w.recipe for w in weights}) > 1:
        return out
    return BlockwiseFP8Weight(out, weights[0].recipe)


@implements(WEIGHT_OPS, aten.copy_.default)
def _copied(func: Any, w: Tensor, source: Tensor, *args: Any) -> Tensor:
    if isinstance(w, BlockwiseFP8Weight) and not isinstance(source, FP8Base):
        refuse_bytes(w, source)
    written: Tensor = on_master(func, (w, source, *args), {})
    return written


@implements(
    WEIGHT_OPS,
    aten.set_.default,
    aten.set_.source_Tensor,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
)
def _set(func: Any, w: BlockwiseFP8Weight, *args: Any) -> Tensor:
    source = args[0] if args else None
    layout = w.shape, w.stride()  # the wrapper keeps both
    if not isinstance(source, Tensor) or (source.shape, source.stride()) != layout:
        _refuse_new_layout(func, w)
    return on_master(func, (w, *args), {})


@implements(
    WEIGHT_OPS,
    aten.t_.default,
    aten.transpose_.default,
    aten.swapaxes_.default,
    aten.swapdims_.default,
    aten.unsqueeze_.default,
    aten.squeeze_.default,
    aten.squeeze_.dim,
    aten.squeeze_.dims,
    aten.as_strided_.default,
)
def _refuse_new_layout(func: Any, w: BlockwiseFP8Weight, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        f"{func} would change the layout of an FP8 weight {list(w.shape)} in place: use the op "
        f"that returns a view (.t(), .transpose(), .view()), or give the module a new parameter"
    )


@implements(WEIGHT_OPS, aten.resize_.default, aten.resize_as_.default)
def _resize(func: Any, w: BlockwiseFP8Weight, size: Any, **kwargs: Any) -> Tensor:
    """Keep a weight of this size: ``torch.randn(shape, out=w.data)`` resizes it first."""
    if list(size.shape if isinstance(size, Tensor) else size) != list(w.shape):
        _refuse_new_layout(func, w)
    return w


@implements(WEIGHT_OPS, aten._to_copy.default)
def _to_copy(func: Any, w: BlockwiseFP8Weight, **kwargs: Any) -> Tensor:
    dtype = only_dtype(w, kwargs)
    if dtype not in checks.HIGH_PRECISION or isinstance(w._late, LateCopy):
        return _copy(func, w, **kwargs)
    is_traced = type(w.cache.master) not in PLAIN
    if not (_is_dense(w.cache.master) and (is_traced or is_read_at_once(w))):
        return _copy(func, w, **kwargs)
    return _late(LateCopy(w.cache, dtype), w.transposed)


def _is_dense(master: Tensor) -> bool:
    return master.is_contiguous() or master.transpose(-1, -2).is_contiguous()


@implements(WEIGHT_OPS, aten.clone.default, aten.empty_like.default, aten._pin_memory.default)
def _copy(func: Any, w: BlockwiseFP8Weight, *device: Any, **kwargs: Any) -> Tensor:
    master = func(w._readable, *device, **kwargs)
    if master.dtype not in checks.HIGH_PRECISION and not converts_a_model():
        return master
    cache = FP8Cache(w._oriented(master), w.recipe)
    return BlockwiseFP8Weight(master, cache=cache, transposed=w.transposed)
