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
from .aot_autograd import share_storage
from .base import on_master, view_of_its_kind
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
        share_storage(views, w)
        return views

    return run


@_view
def _alias(func: Any, w: BlockwiseFP8Weight) -> BlockwiseFP8Weight:
    return BlockwiseFP8Weight(w.master, cache=w.cache, transposed=w.transposed)


@_view
def _t(func: Any, w: BlockwiseFP8Weight) -> BlockwiseFP8Weight:
    return BlockwiseFP8Weight(w.master.t(), cache=w.cache, transposed=not w.transposed)


@_view
def _transpose(func: Any, w: BlockwiseFP8Weight, dim0: int, dim1: int) -> Tensor:
    if {dim0 % w.ndim, dim1 % w.ndim} != {w.ndim - 2, w.ndim - 1}:
        return _as_weight(func(w.master, dim0, dim1), w)
    master = w.master.transpose(-1, -2)
    return BlockwiseFP8Weight(master, cache=w.cache, transposed=not w.transposed)


@_view
def _permute(func: Any, w: BlockwiseFP8Weight, dims: list[int]) -> Tensor:
    last_two_swapped = [*range(w.ndim - 2), w.ndim - 1, w.ndim - 2]
    if [d % w.ndim for d in dims] != last_two_swapped:
        return _as_weight(func(w.master, dims), w)
    return _transpose(func, w, -1, -2)


@_view
def _part(func: Any, w: BlockwiseFP8Weight, *args: Any, **kwargs: Any) -> Any:
    """Views of a weight: matrices and stacks are weights, with blocks that begin where they do."""
    views = func(w.master, *args, **kwargs)
    return torch.utils._pytree.tree_map(lambda view: _as_weight(view, w), views)


def _as_weight(view: Tensor, w: BlockwiseFP8Weight) -> Tensor:
    if view.ndim not in _RANKS or view.dtype != w.dtype:
        return view
    master = w.master
    layout = view.shape, view.stride(), view.storage_offset()
    if layout == (master.shape, master.stride(), master.storage_offset()):
        return BlockwiseFP8Weight(master, cache=w.cache, transposed=w.transposed)
    return BlockwiseFP8Weight(view, cache=FP8Cache(view, w.recipe, counted=w.counted))


def _joined(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    out = on_master(func, (tensors, dim), {})
    weights = [x for x in tensors if isinstance(x, BlockwiseFP8Weight)]
    if len(weights) < len(tensors) or out.ndim not in _RANKS:
        return out
    if out.dtype not in checks.HIGH_PRECISION or len({w.recipe for w in weights}) > 1:
        return out
    return BlockwiseFP8Weight(out, weights[0].recipe)


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


def _copy(func: Any, w: BlockwiseFP8Weight, **kwargs: Any) -> Tensor:
    master = func(w.master, **kwargs)
    if master.dtype not in checks.HIGH_PRECISION:
        return master
    cache = FP8Cache(master.transpose(-1, -2) if w.transposed else master, w.recipe)
    return BlockwiseFP8Weight(master, cache=cache, transposed=w.transposed)


_PARTS = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default),
    *(aten.slice.Tensor, aten.select.int, aten.unbind.int, aten.as_strided.default),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.unfold.default),
    *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
)
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
    **dict.fromkeys(_NEW_LAYOUTS, _refuse_new_layout),
    **dict.fromkeys(_SETS, _set),
    aten.cat.default: _joined,
    aten.stack.default: _joined,
    aten.clone.default: _copy,
    aten._to_copy.default: _copy,
    aten.empty_like.default: _copy,
}
