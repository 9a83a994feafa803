"""The part of a tensor that a rank holds, and its cast with the scales of the whole weight.

A 128x128 block may lie on several ranks, and must have the bytes that it has in one process. So a
cast has three steps:

1. Each rank computes the amax of its share of every block (:meth:`Part.amax`).
2. An all-reduce gives the amax of every whole block (:func:`max_over_ranks`), and so its scale.
3. Each rank casts its values by these amaxes (:meth:`Part.cast`).

FSDP2 takes step 2 for all weights of a forward together (``fsdp/amax_table.py``), tensor
parallelism for each weight (``tensor_parallel/weight_part.py``), and a gather of whole tensors for
all tensors with equal cuts (``whole.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.cast.ops import quantize_shard, shard_amax
from ..ops.formats import BlockFormat, ceil_div


class Piece(NamedTuple):
    """A run of indices along one dimension: its place in the whole, and in the local part."""

    start: int
    local: int
    size: int


class Region(NamedTuple):
    """A contiguous region of a tensor that a rank holds: one :class:`Piece` for each dimension."""

    pieces: tuple[Piece, ...]

    @classmethod
    def along(cls, dim: int, start: int, size: int, shape: Sequence[int]) -> Region:
        """Return ``size`` indices from ``start`` on along ``dim`` of a tensor of this ``shape``."""
        pieces = [Piece(0, 0, each) for each in shape]
        pieces[dim] = Piece(start, 0, size)
        return cls(tuple(pieces))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the region in the whole."""
        return tuple(slice(p.start, p.start + p.size) for p in self.pieces)

    def of(self, local: Tensor) -> Tensor:
        """Return the region as a view of the local part."""
        return local[tuple(slice(p.local, p.local + p.size) for p in self.pieces)]


@dataclass(frozen=True)
class Part:
    """A region of a weight that this rank casts with the scales of the whole weight.

    Attributes:
        shape: the shape of the whole weight, ``[..., N, K]``.
        region: the place of the part in the weight.
        format: the format of its cast.
    """

    shape: tuple[int, ...]
    region: Region
    format: BlockFormat

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the amaxes, and of the scales, of the whole weight."""
        return self.format.scale_shape(self.shape)

    @cached_property
    def blocks(self) -> tuple[slice, ...]:
        """The index of its blocks in the amaxes of the whole weight."""
        edges = (1,) * (len(self.shape) - 2) + self.format.block_shape
        return tuple(
            slice(p.start // block, ceil_div(p.start + p.size, block))
            for p, block in zip(self.region.pieces, edges, strict=True)
        )

    @cached_property
    def offsets(self) -> tuple[int, int]:
        """The rows and columns between the start of its first block and its own start."""
        rows, cols = self.region.pieces[-2:]
        return rows.start % self.format.rows, cols.start % self.format.cols

    def amax(self, values: Tensor) -> Tensor:
        """Return the amax of this part's share of each of its blocks, fp32."""
        return shard_amax(values, self.format, *self.offsets)

    def cast(self, values: Tensor, amax: Tensor, own: Tensor | None = None) -> Tensor:
        """Return the data of this part.

        Args:
            values: the part in high precision.
            amax: the amax of each of its blocks, in the whole weight.
            own: the :meth:`amax` of this part in the reduction that made ``amax``: blocks become
                NaN where the values have another one. None trusts the caller.
        """
        return quantize_shard(values, amax, self.format, *self.offsets, own)


def check_groups(shape: Sequence[int], dim: int, each: int, format: BlockFormat) -> None:
    """Check that parts of ``each`` indices along ``dim`` of a weight cut no groups of its grid.

    All ranks decide the same, since they know the same sizes.

    Raises:
        NotImplementedError: they do.
    """
    if format.mxfp4_group is None or dim < len(shape) - 2 or each >= shape[dim]:
        return
    group = format.mxfp4_group[dim - len(shape)]
    if each % group:
        raise NotImplementedError(
            f"parts of {each} of {shape[dim]} indices along dimension {dim} of an FP8 weight "
            f"{list(shape)}: casts to the grid of MXFP4 need whole groups of {group} there; cut "
            f"another dimension, use fewer ranks, or convert this weight without weight_grid"
        )


def max_over_ranks(amax: Tensor, group: dist.ProcessGroup, *, functional: bool = False) -> Tensor:
    """Return the maxima of fp32 magnitudes over the ranks of a group, by one all-reduce.

    Args:
        amax: contiguous; overwritten by the result unless ``functional``.
        group: the ranks, all of which call this.
        functional: run the op that compiled graphs can hold. It takes more host time.
    """
    # as integers, magnitudes keep their order, with NaN above Inf
    bits = amax.view(torch.int32)
    if functional:
        ops = torch.ops._c10d_functional
        bits = ops.wait_tensor(ops.all_reduce(bits, "max", group.group_name))
    else:
        dist.all_reduce(bits, dist.ReduceOp.MAX, group)
    return bits.view(torch.float32)
