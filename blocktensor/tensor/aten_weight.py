"""Views, copies and concatenations of BlockwiseFP8Weights that are weights too.

Other ops act on the master.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..ops import checks
from ..ops.runtime.specialize import PLAIN
from .aot_autograd import share_storage
from .base import FP8Base, on_master, only_dtype, view_of_its_kind
from .late_copy import LateCopy
from .module_apply import converts_a_model
from .refusals import refuse_bytes, refuse_to_pick
from .weight import BlockwiseFP8Weight
from .weight_cache import FP8Cache

aten = torch.ops.aten

_RANKS = (2, 3)
"""Ranks of weights: matrices and stacks of them."""


def _view(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Give views the kind of their weight and, for compilers, its storage."""
    of_its_kind = view_of_its_kind(implementation)

    @functools.wraps(implementation)
    def run(func: Any, w: BlockwiseFP8Weight, *args: Any, **kwargs: Any) -> Any:
        views = of_its_kind(func, w, *args, **kwargs)
        if not isinstance(w.cache, LateCopy):  # which has memory of its own, once it is asked for
            share_storage(views, w)
        return views

    return run


@_view
def _alias(func: Any, w: BlockwiseFP8Weight) -> BlockwiseFP8Weight:
    return BlockwiseFP8Weight(w.master, cache=w.cache.own(), transposed=w.transposed)


@_view
def _t(func: Any, w: BlockwiseFP8Weight) -> BlockwiseFP8Weight:
    return _swapped(w)


def _swapped(w: BlockwiseFP8Weight) -> BlockwiseFP8Weight:
    """The transpose, which shares the cache."""
    if isinstance(w.cache, LateCopy):
        return _late(w.cache, not w.transposed)
    master = w.master.transpose(-1, -2)
    return BlockwiseFP8Weight(master, cache=w.cache, transposed=not w.transposed)


def _late(cache: LateCopy, transposed: bool) -> BlockwiseFP8Weight:
    like = cache.source.master  # a copy is laid out as its dense source
    like = like.transpose(-1, -2) if transposed else like
    made = BlockwiseFP8Weight.without_master(like, cache.dtype, cache, transposed)
    if transposed and type(like) not in PLAIN:
        made.traced = cache.values().transpose(-1, -2)
    return made


@_view
def _transpose(func: Any, w: BlockwiseFP8Weight, dim0: int, dim1: int) -> Tensor:
    if {dim0 % w.ndim, dim1 % w.ndim} != {w.ndim - 2, w.ndim - 1}:
        return _as_weight(func(w.master, dim0, dim1), w)
    return _swapped(w)


@_view
def _permute(func: Any, w: BlockwiseFP8Weight, dims: list[int]) -> Tensor:
    last_two_swapped = [*range(w.ndim - 2), w.ndim - 1, w.ndim - 2]
    if [d % w.ndim for d in dims] != last_two_swapped:
        return _as_weight(func(w.master, dims), w)
    return _transpose(func, w, -1, -2)


@_view
def _part(func: Any, w: BlockwiseFP8Weight, *args: Any, **kwargs: Any) -> Any:
    """Views of a weight: matrices and stacks are weights, with blocks that begin where they do."""
    cache = w.cache
    if isinstance(cache, LateCopy):
        views = func(w.oriented(cache.source.master), *args, **kwargs)
        if all(view.ndim in _RANKS for view in torch.utils._pytree.tree_leaves(views)):
            return _late_parts(func, w, cache, views, args, kwargs)
    views = func(w.master, *args, **kwargs)
    return torch.utils._pytree.tree_map(lambda view: _as_weight(view, w), views)


def _late_parts(
    func: Any, w: BlockwiseFP8Weight, cache: LateCopy, views: Any, args: Any, kwargs: Any
) -> Any:
    """Views of a copy that may not be made yet; ``views``: the same of the weight."""
    leaves, structure = torch.utils._pytree.tree_flatten(views)

    def part(index: int, view: Tensor) -> BlockwiseFP8Weight:
        def cut(copy: Tensor) -> Tensor:
            made = func(w.oriented(copy), *args, **kwargs)
            of_part: Tensor = torch.utils._pytree.tree_leaves(made)[index]
            return of_part

        if _layout(view) == _layout(w.oriented(cache.source.master)):
            return _late(cache, w.transposed)
        source = FP8Cache(view, w.recipe, counted=cache.source.counted)
        return _late(LateCopy(source, cache.dtype, cache, cut), False)

    return structure.unflatten([part(i, view) for i, view in enumerate(leaves)])


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset()


@_view
def _select(func: Any, w: BlockwiseFP8Weight, dim: int, index: int) -> Tensor:
    is_matrix = w.ndim == 3 and dim in (0, -3) and type(index) is int
    return _matrix(w, index) if is_matrix else _part(func, w, dim, index)


@_view
def _unbind(func: Any, w: BlockwiseFP8Weight, dim: int = 0) -> list[Tensor]:
    if w.ndim == 3 and dim in (0, -3):
        return [_matrix(w, i) for i in range(w.shape[0])]
    parts: list[Tensor] = _part(func, w, dim)
    return parts


def _matrix(w: BlockwiseFP8Weight, index: int) -> Tensor:
    """A matrix of a stack; its cache is the same for every view, so that microbatches share it."""
    count = w.shape[0]
    if not -count <= index < count:
        raise IndexError(f"index {index} of a stack of {count} matrices")
    cache = w.cache.part(index % count)
    if isinstance(cache, LateCopy):
        return _late(cache, w.transposed)
    return BlockwiseFP8Weight(w.master[index], cache=cache, transposed=w.transposed)


def _as_weight(view: Tensor, w: BlockwiseFP8Weight) -> Tensor:
    if view.ndim not in _RANKS or view.dtype != w.dtype:
        return view
    if _layout(view) == _layout(w.master):
        return BlockwiseFP8Weight(w.master, cache=w.cache, transposed=w.transposed)
    return BlockwiseFP8Weight(view, cache=FP8Cache(view, w.recipe, counted=w.counted))


def _picked(func: Any, w: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Rows of a matrix, as of an embedding; matrices of a stack are refused."""
    out: Tensor = on_master(func, (w, *args), kwargs)
    if isinstance(w, BlockwiseFP8Weight) and w.ndim > 2 and out.ndim > 1:
        refuse_to_pick(func, w, ".high_precision()")
    return out


def _joined(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    out = on_master(func, (tensors, dim), {})
    weights = [x for x in tensors if isinstance(x, BlockwiseFP8Weight)]
    if len(weights) < len(tensors) or out.ndim not in _RANKS:
        return out
    if out.dtype not in checks.HIGH_PRECISION or len({w.recipe for w in weights}) > 1:
        return out
    return BlockwiseFP8Weight(out, weights[0].recipe)


def _copied(func: Any, w: Tensor, source: Tensor, *args: Any) -> Tensor:
    if isinstance(w, BlockwiseFP8Weight) and not isinstance(source, FP8Base):
        refuse_bytes(w, source)
    written: Tensor = on_master(func, (w, source, *args), {})
    return written


def _set(func: Any, w: BlockwiseFP8Weight, *args: Any) -> Tensor:
    source = args[0] if args else None
    if not isinstance(source, Tensor) or source.shape != w.shape:
        _refuse_new_layout(func, w)
    return on_master(func, (w, *args), {})


def _refuse_new_layout(func: Any, w: BlockwiseFP8Weight, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        f"{func} would change the layout of an FP8 weight {list(w.shape)} in place: use the op "
        f"that returns a view (.t(), .transpose(), .view()), or give the module a new parameter"
    )


def _to_copy(func: Any, w: BlockwiseFP8Weight, **kwargs: Any) -> Tensor:
    dtype = only_dtype(w, kwargs)
    late = isinstance(w.cache, LateCopy)
    if late or dtype not in checks.HIGH_PRECISION or not _is_dense(w.cache.master):
        return _copy(func, w, **kwargs)
    return _late(LateCopy(w.cache, dtype), w.transposed)


def _is_dense(master: Tensor) -> bool:
    return master.is_contiguous() or master.transpose(-1, -2).is_contiguous()


def _copy(func: Any, w: BlockwiseFP8Weight, **kwargs: Any) -> Tensor:
    master = func(w.readable, **kwargs)
    if master.dtype not in checks.HIGH_PRECISION and not converts_a_model():
        return master
    cache = FP8Cache(master.transpose(-1, -2) if w.transposed else master, w.recipe)
    return BlockwiseFP8Weight(master, cache=cache, transposed=w.transposed)


_PARTS = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default),
    *(aten.slice.Tensor, aten.as_strided.default),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.unfold.default),
    *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
)
_PICKS = (aten.index.Tensor, aten.index_select.default, aten.gather.default)
_NEW_LAYOUTS = (
    *(aten.t_.default, aten.transpose_.default, aten.swapaxes_.default, aten.swapdims_.default),
    *(aten.unsqueeze_.default, aten.squeeze_.default, aten.squeeze_.dim, aten.squeeze_.dims),
    *(aten.resize_.default, aten.resize_as_.default, aten.as_strided_.default),
)
_SETS = (
    *(aten.set_.default, aten.set_.source_Tensor, aten.set_.source_Storage),
    aten.set_.source_Storage_storage_offset,
)

WEIGHT_VIEWS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,  # w.T
    **dict.fromkeys(_PARTS, _part),
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    **dict.fromkeys(_PICKS, _picked),
    **dict.fromkeys(_NEW_LAYOUTS, _refuse_new_layout),
    **dict.fromkeys(_SETS, _set),
    aten.cat.default: _joined,
    aten.stack.default: _joined,
    aten.clone.default: _copy,
    aten.copy_.default: _copied,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _copy,
}
