"""Views of a BlockwiseFP8Tensor: the same bytes under another shape or orientation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .base import view_of_its_kind
from .bucket import Bucket
from .fp8_tensor import BlockwiseFP8Tensor
from .refusals import refuse

aten = torch.ops.aten


@view_of_its_kind
def _alias(func: Any, x: BlockwiseFP8Tensor) -> BlockwiseFP8Tensor:
    return x.relabel()


@view_of_its_kind
def _t(func: Any, x: BlockwiseFP8Tensor) -> BlockwiseFP8Tensor:
    if x.ndim != 2:
        refuse(func)
    return _swap_last(x)


@view_of_its_kind
def _transpose(func: Any, x: BlockwiseFP8Tensor, dim0: int, dim1: int) -> BlockwiseFP8Tensor:
    dims = {dim0 % x.ndim, dim1 % x.ndim}
    if len(dims) == 1:
        return x.relabel()
    held_flat = x.format.rows == 1 and x.ndim != 2
    if dims != {x.ndim - 2, x.ndim - 1} or held_flat:
        raise NotImplementedError(
            f"transpose({dim0}, {dim1}) of a BlockwiseFP8Tensor {list(x.shape)}: FP8 blocks can "
            f"swap only the last two dimensions of a matrix (or stack of 128x128-block matrices); "
            f"call .dequantize() first"
        )
    return _swap_last(x)


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


@view_of_its_kind
def _reshape(func: Any, x: BlockwiseFP8Tensor, size: list[int]) -> Tensor:
    shape = _infer(list(size), x)
    if x.format.transposes and len(shape) == 1:
        return Bucket.of(x)  # as DDP sends it to other ranks
    leading_only = x.format.rows == 1 and x.is_contiguous() and shape[-1:] == [x.shape[-1]]
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


@view_of_its_kind
def _as_strided(
    func: Any, x: BlockwiseFP8Tensor, size: list[int], stride: list[int], offset: int | None = None
) -> BlockwiseFP8Tensor:
    if (tuple(size), tuple(stride), offset or 0) != (tuple(x.shape), x.stride(), 0):
        refuse(func)
    return x.relabel()  # as FSDP lays out a weight that it has gathered


VIEWS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,  # x.T
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.as_strided.default: _as_strided,
}
