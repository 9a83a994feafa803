"""Where the ranks' parts of a DTensor are in the whole, whoever cut it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.formats import BlockFormat, ceil_div
from ..tensor.base import FP8Base
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from .fsdp.shards import FrozenShard


class Piece(NamedTuple):
    """A run of indices along one dimension: where it is in the whole, and in the local part."""

    start: int
    local: int
    size: int


class Region(NamedTuple):
    """A part of a weight that lies in one piece in the whole, by a :class:`Piece` a dimension."""

    pieces: tuple[Piece, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where it is in the whole."""
        return tuple(slice(p.start, p.start + p.size) for p in self.pieces)

    def of(self, local: Tensor) -> Tensor:
        """Return the view of it in the local part."""
        return local[tuple(slice(p.local, p.local + p.size) for p in self.pieces)]

    def blocks(self, format: BlockFormat) -> tuple[slice, ...]:
        """Return where its blocks are in the scales of the whole."""
        return tuple(
            slice(p.start // block, ceil_div(p.start + p.size, block))
            for p, block in zip(self.pieces, _edges(format, len(self.pieces)), strict=True)
        )

    def offsets(self, format: BlockFormat) -> tuple[int, int]:
        """Return how many rows and columns into its first block it begins."""
        rows, cols = self.pieces[-2:]
        return rows.start % format.rows, cols.start % format.cols

    def in_blocks(self, format: BlockFormat) -> Region:
        """Return the region of its blocks, where pieces begin at borders of blocks."""
        edges = _edges(format, len(self.pieces))
        return Region(
            tuple(
                Piece(p.start // edge, p.local // edge, ceil_div(p.size, edge))
                for p, edge in zip(self.pieces, edges, strict=True)
            )
        )


def _edges(format: BlockFormat, ndim: int) -> tuple[int, ...]:
    return (1,) * (ndim - 2) + format.block_shape


class Cut(NamedTuple):
    """The mesh of a DTensor, and those of its dimensions along which ranks hold other parts."""

    mesh: Any
    dims: tuple[int, ...]

    @staticmethod
    def of(x: Any) -> Cut:
        """Return how a DTensor is cut."""
        mesh = x.device_mesh
        along = enumerate(x.placements)
        return Cut(mesh, tuple(i for i, p in along if mesh.size(i) > 1 and not p.is_replicate()))

    @property
    def device(self) -> torch.device:
        """The device on which the ranks send; FSDP may have moved their parts to the CPU."""
        return torch.device(self.mesh.device_type)

    def coordinates(self) -> Iterator[list[int]]:
        """Yield where the ranks are that have all parts together, in the order of the mesh."""
        for places in itertools.product(*(range(self.mesh.size(dim)) for dim in self.dims)):
            coordinate = list(self.mesh.get_coordinate())
            for dim, place in zip(self.dims, places, strict=True):
                coordinate[dim] = place
            yield coordinate


class Held(NamedTuple):
    """The part of a DTensor that a rank holds; it has several regions if it is parts of halves."""

    shape: tuple[int, ...]
    regions: list[Region]


def held_by_ranks(x: Any, uncut: int = 0) -> list[Held]:
    """Return what each rank of a DTensor's mesh holds, in the order of the mesh.

    The first ``uncut`` dimensions of the mesh are taken as if they did not cut the tensor.
    """
    mesh = x.device_mesh
    sizes = [mesh.size(i) for i in range(mesh.ndim)]

    def parts(i: int, placement: Any, dim: int) -> int:
        if i < uncut or placement.is_replicate() or placement.dim % x.ndim != dim:
            return 0
        # how many parts there are of which each is cut between ranks
        return int(getattr(placement, "split_factor", 1))

    along = [
        _pieces(size, tuple((sizes[i], parts(i, p, dim)) for i, p in enumerate(x.placements)))
        for dim, size in enumerate(x.shape)
    ]
    return [
        Held(
            tuple(sum(piece.size for piece in each[rank]) for each in along),
            [Region(pieces) for pieces in itertools.product(*(each[rank] for each in along))],
        )
        for rank in range(math.prod(sizes))
    ]


def held(x: Any, uncut: int = 0) -> Held:
    """Return :func:`held_by_ranks` of this rank."""
    return held_by_ranks(x, uncut)[rank_at(x.device_mesh, x.device_mesh.get_coordinate())]


def rank_at(mesh: Any, coordinate: Sequence[int]) -> int:
    """Return the place of a coordinate in the order of the mesh."""
    rank = 0
    for i, at in enumerate(coordinate):
        rank = rank * int(mesh.size(i)) + at
    return rank


@functools.cache
def _pieces(size: int, cuts: tuple[tuple[int, int], ...]) -> list[list[Piece]]:
    """Return what each rank holds of ``size`` indices, in the mesh's order of ranks.

    ``cuts``: for each dimension of the mesh its size, and the number of parts that it cuts; 0 if
    its ranks hold the same.
    """
    held = [torch.arange(size)]
    for ranks, parts in cuts:
        held = [
            torch.cat([_chunks(part, ranks)[rank] for part in _chunks(indices, parts)])
            if parts
            else indices
            for indices in held
            for rank in range(ranks)
        ]
    return [list(_runs(indices.tolist())) for indices in held]


def _chunks(x: Tensor, count: int) -> list[Tensor]:
    """Cut a vector as DTensor does: the last chunks are shorter, or empty."""
    step = ceil_div(len(x), count)
    return [x[i * step : (i + 1) * step] for i in range(count)]


def _runs(indices: Sequence[int]) -> Iterator[Piece]:
    first = 0
    for at in range(1, len(indices) + 1):
        if at == len(indices) or indices[at] != indices[at - 1] + 1:
            yield Piece(indices[first], first, at - first)
            first = at


def frozen_parts(part: FP8Base) -> tuple[Tensor, Tensor]:
    """Return the bytes and the scales that a rank holds of a frozen weight."""
    if isinstance(part, FrozenShard):
        return part.data_rows, part.scale
    assert isinstance(part, BlockwiseFP8Tensor)
    data, scale, _ = part.rowwise()
    return data, scale


def scale_regions(x: Any, part: FP8Base, format: BlockFormat) -> list[Region]:
    """Return where the scales that a rank holds of a frozen weight are among all scales."""
    if not isinstance(part, FrozenShard):
        return [region.in_blocks(format) for region in held(x).regions]
    # It has the scales of all that its group of FSDP shards, whose placements come first.
    for count in range(len(x.placements) + 1):
        regions = held(x, uncut=count).regions
        blocks = regions[0].blocks(format) if len(regions) == 1 else ()
        if [each.stop - each.start for each in blocks] == list(part.scale.shape):
            return [Region(tuple(Piece(each.start, 0, each.stop - each.start) for each in blocks))]
    raise AssertionError(f"{tuple(part.scale.shape)} scales of {tuple(x.shape)}, {x.placements}")
