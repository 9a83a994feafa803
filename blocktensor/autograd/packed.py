"""Pack an activation to e4m3 in 1x128 blocks, by how it lies in memory, and unpack it.

The rows of a cast are rows of memory. So ``x``, ``x.view(...)`` and ``x.transpose(...)`` have one
cast, and no pack copies x first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.cast.ops import dequantize, quantize_rowwise
from ..ops.formats import BLOCKS_1X128, Quantized
from ..ops.runtime.launch import this_thread
from ..ops.runtime.specialize import watching
from ..tensor.late_copy import LateCopy


class MemoryRows(NamedTuple):
    """The memory of a tensor as rows of numbers.

    Attributes:
        sizes, strides: of the memory, with as few dimensions as possible; no element occurs twice.
        width: elements of a row, which ends a block; at least as many as a block has.
        numel: the number of elements.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    width: int
    numel: int


def rows_of(x: Tensor) -> MemoryRows | None:
    """Return the rows of the memory of ``x``, or None where it has none to cast.

    A row is one of the tensor that ``x`` is a view of, if ``x`` holds such rows whole; else the
    part of it that ``x`` holds; else a row of ``x``. Rows of less than a block are joined.
    """
    if x.is_neg():
        return None  # memory holds other values: kernels do not see this bit
    base = x if x._base is None else x._base
    return _rows(x.shape, x.stride(), _inner_size(base.shape, base.stride()))


@lru_cache(maxsize=1024)
def _rows(shape: Sequence[int], strides: Sequence[int], base_width: int) -> MemoryRows | None:
    """Return the rows of a tensor with this shape and these strides.

    ``base_width``: elements in a row of the tensor that it is a view of.
    """
    in_memory: list[list[int]] = []  # sizes and strides
    for dim in _by_stride(shape, strides):
        size, stride = shape[dim], strides[dim]
        extent = size * stride
        if in_memory and in_memory[-1][1] < extent:
            return None  # the memory overlaps
        if in_memory and in_memory[-1][1] == extent:
            in_memory[-1] = [in_memory[-1][0] * size, stride]
        else:
            in_memory.append([size, stride])
    if 0 in shape or not in_memory or in_memory[-1][1] != 1:
        return None
    run, block = in_memory[-1][0], BLOCKS_1X128.cols
    part = run if len(in_memory) > 1 and run < base_width else base_width
    # all views of short rows have rows of one block, so that they share a cast
    is_short = base_width < block
    widths = (block,) if is_short else (base_width, part, _inner_size(shape, strides), block)
    for width in widths:
        if width >= block and run % width == 0:
            sizes, steps = zip(*in_memory, strict=True)
            return MemoryRows(sizes, steps, width, math.prod(sizes))
    return None


@lru_cache(maxsize=1024)
def _inner_size(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the size of the dimension that is contiguous in memory."""
    dims = _by_stride(shape, strides)
    return shape[dims[-1]] if dims and strides[dims[-1]] == 1 else 1


@lru_cache(maxsize=1024)
def _without_gaps(shape: Sequence[int], strides: Sequence[int]) -> Sequence[int]:
    """Return strides of a tensor that has the same order of dimensions and no gaps in memory."""
    made, step = [*strides], 1
    for dim in reversed(_by_stride(shape, strides)):
        made[dim] = step
        step *= shape[dim]
    return tuple(made)


def _by_stride(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the dimensions that step through memory, the largest step first."""
    dims = [i for i, size in enumerate(shape) if size > 1 and strides[i] > 0]
    return sorted(dims, key=strides.__getitem__, reverse=True)


class Packed:
    """The cast of a tensor's memory, which all savers of this memory share.

    Attributes:
        cast: e4m3 data ``[rows, width]`` and fp32 scales.
        dtype: of the tensor.
    """

    __slots__ = ("__weakref__", "cast", "dtype")

    def __init__(self, x: Tensor, rows: MemoryRows) -> None:
        if len(rows.sizes) == 1:  # without gaps
            memory = x.as_strided((rows.sizes[0] // rows.width, rows.width), (rows.width, 1))
        else:
            memory = x.as_strided(rows.sizes, rows.strides).reshape(-1, rows.width)
        if this_thread.watch is None:
            self.cast: Quantized = quantize_rowwise(memory, BLOCKS_1X128)
        else:
            with watching(None) as watch:
                watch(Packed, (memory, BLOCKS_1X128))  # apart from the casts of matmuls
                self.cast = quantize_rowwise(memory, BLOCKS_1X128)
        self.dtype = x.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        data, scale, _ = self.cast
        return data.untyped_storage().nbytes() + scale.untyped_storage().nbytes()


class Version:
    """The version of a tensor, without its memory.

    An alias shares the counter of in-place changes with the tensor. Given other memory, it keeps
    the counter.
    """

    __slots__ = ("_alias", "_saved")

    def __init__(self, x: Tensor) -> None:
        self._saved, self._alias = x._version, x.detach()
        self._alias.data = x.new_empty(0)

    def check(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Raise if the tensor was changed in place since it was saved.

        Args:
            dtype, shape: of the tensor.

        Raises:
            RuntimeError: it was changed.
        """
        version = self._alias._version
        if version != self._saved:
            raise _changed(f"{dtype} tensor {list(shape)}, saved in FP8,", self._saved, version)


def _changed(what: str, saved: int, version: int) -> RuntimeError:
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a {what} is at version {version}; expected version {saved} instead. "
        f"torch.autograd.set_detect_anomaly(True) finds the operation that failed to compute its "
        f"gradient; clone the tensor before the change, or change it out of place"
    )


class SavedTensor:
    """A saved tensor whose values are in a :class:`Packed`, until :meth:`keep` is called.

    Attributes:
        saved: the cast, or the tensor that is kept in its place.
    """

    __slots__ = ("__weakref__", "_shape", "_strides", "_version", "saved")

    def __init__(self, x: Tensor, packed: Packed) -> None:
        self.saved: Packed | KeptTensor = packed
        self._shape, self._version = x.shape, Version(x)
        self._strides = _without_gaps(x.shape, x.stride())

    def keep(self, x: Tensor) -> None:
        """Keep the tensor itself, which is ``x``, in place of the rounded values."""
        self.saved = KeptTensor(x)

    def unpack(self) -> Tensor:
        """Return the rounded values; they lie as in the tensor, without gaps in memory.

        Raises:
            RuntimeError: the tensor was changed in place since it was saved.
        """
        packed = self.saved
        if isinstance(packed, KeptTensor):
            return packed.unpack()
        self._version.check(packed.dtype, self._shape)
        made: Any = dequantize(packed.cast, packed.dtype)
        return made.as_strided(self._shape, self._strides)


class KeptTensor:
    """A saved tensor that is not packed."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, x: Tensor) -> None:
        # The node that has computed x may be the one that saves it: no reference to it through x.
        # `detach` would make the copy that an FP8 weight in another dtype delays.
        refers = x.is_leaf or isinstance(getattr(x, "_late", None), LateCopy)
        self._tensor, self._version = x if refers else x.detach(), x._version

    def unpack(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: the tensor was changed in place since it was saved.
        """
        x, saved = self._tensor, self._version
        if x._version != saved:
            of = "" if x.is_nested else f" {list(x.shape)}"
            raise _changed(f"{x.dtype} tensor{of}", saved, x._version)
        return x
