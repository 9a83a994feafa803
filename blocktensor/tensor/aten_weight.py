"""Views and copies of a BlockwiseFP8Weight that stay weights; other ops act on the master."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops import checks
from .base import on_master, view_of_its_kind
from .weight import BlockwiseFP8Weight
from .weight_cache import FP8Cache

aten = torch.ops.aten


@view_of_its_kind
def _alias(func: Any, w: BlockwiseFP8Weight) -> BlockwiseFP8Weight:
    return BlockwiseFP8Weight(w.master, cache=w.cache, transposed=w.transposed)


@view_of_its_kind
def _t(func: Any, w: BlockwiseFP8Weight) -> BlockwiseFP8Weight:
    return BlockwiseFP8Weight(w.master.t(), cache=w.cache, transposed=not w.transposed)


@view_of_its_kind
def _transpose(func: Any, w: BlockwiseFP8Weight, dim0: int, dim1: int) -> Tensor:
    if {dim0 % w.ndim, dim1 % w.ndim} != {w.ndim - 2, w.ndim - 1}:
        return on_master(func, (w, dim0, dim1), {})
    master = w.master.transpose(-1, -2)
    return BlockwiseFP8Weight(master, cache=w.cache, transposed=not w.transposed)


@view_of_its_kind
def _permute(func: Any, w: BlockwiseFP8Weight, dims: list[int]) -> Tensor:
    last_two_swapped = [*range(w.ndim - 2), w.ndim - 1, w.ndim - 2]
    if [d % w.ndim for d in dims] != last_two_swapped:
        return on_master(func, (w, dims), {})
    return _transpose(func, w, -1, -2)


def _copy(func: Any, w: BlockwiseFP8Weight, **kwargs: Any) -> Tensor:
    master = func(w.master, **kwargs)
    if master.dtype not in checks.HIGH_PRECISION:
        return master
    cache = FP8Cache(master.transpose(-1, -2) if w.transposed else master, w.recipe)
    return BlockwiseFP8Weight(master, cache=cache, transposed=w.transposed)


WEIGHT_VIEWS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,  # w.T
    aten.clone.default: _copy,
    aten._to_copy.default: _copy,
    aten.empty_like.default: _copy,
}
