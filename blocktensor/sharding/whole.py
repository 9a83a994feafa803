"""Gather whole FP8 weights, of which ranks hold parts, as e4m3 bytes.

It serves every DTensor, whoever cut it (FSDP2, tensor or expert parallelism, or several of them),
with trainable and frozen local parts. What travels is one byte an element, and 4 bytes a block. A
block may lie on several ranks: its scale is that of the whole block, as in a forward.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.cast.ops import quantize_rowwise, quantize_shard, shard_amax
from ..ops.formats import BlockFormat, Quantized, ceil_div
from ..ops.reference import scale_from_amax
from ..tensor.base import FP8Base, MasterBase
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from .dtensor import local_of
from .fsdp.shards import FrozenShard


def fp8_of(x: Tensor) -> FP8Base | None:
    """Return a tensor in FP8, or the local part in FP8 of a DTensor; None for others."""
    local = local_of(x)
    found = x if local is None else local
    return found if isinstance(found, FP8Base) else None


def format_of(x: FP8Base) -> BlockFormat:
    """Return the format of the rowwise form of an FP8 weight, or of a part of one."""
    if isinstance(x, BlockwiseFP8Tensor):
        return x.rowwise_format
    format: BlockFormat = x.recipe.weight_format  # type: ignore[attr-defined]
    return format


def whole_form(x: Tensor) -> Quantized:
    """Return the rowwise form of a whole FP8 weight: the bytes that its next forward multiplies by.

    All ranks of a DTensor's mesh must call it; each gets all of the weight, on the mesh's device.
    """
    part, local = fp8_of(x), local_of(x)
    assert part is not None
    if local is None:
        return form_of(part)
    format, device = format_of(part), mesh_device(x)
    table = torch.zeros(format.scale_shape(x.shape), dtype=torch.float32, device=device)
    if isinstance(part, MasterBase):
        regions = list(regions_of(x)) if part.numel() else []
        master = part.master.detach().to(device)
        for region in regions:
            blocks = table[region.blocks(format)]
            amax = shard_amax(region.of(master), format, *region.offsets(format))
            blocks.copy_(torch.maximum(blocks, amax))
        _max_over_ranks(table, x)
        data = torch.empty(master.shape, dtype=format.dtype, device=device)
        for region in regions:
            amax = table[region.blocks(format)]
            cast = quantize_shard(region.of(master), amax, format, *region.offsets(format))
            region.of(data).view(torch.uint8).copy_(cast.view(torch.uint8))
        scale = scale_from_amax(table, format)
    else:
        data, scale = _put_scales(table, part, x, format).to(device), table
        _max_over_ranks(scale, x)
    return Quantized(_full(data.view(torch.uint8), x).view(format.dtype), scale, format)


def whole_tensor(x: Tensor) -> Tensor:
    """Return all of a tensor that is not in FP8, on all ranks of its mesh."""
    if local_of(x) is None:
        return x
    return x.detach().to(mesh_device(x)).full_tensor()  # type: ignore[attr-defined]


def mesh_device(x: Any) -> torch.device:
    """Return the device on which the ranks of a DTensor send; FSDP may have moved it to the CPU."""
    return torch.device(x.device_mesh.device_type)


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


def form_of(x: FP8Base) -> Quantized:
    """Return the rowwise form of an FP8 weight that is no DTensor."""
    if isinstance(x, BlockwiseFP8Tensor):
        return x.rowwise()
    return quantize_rowwise(x.master.detach(), format_of(x))  # type: ignore[attr-defined]


def _put_scales(table: Tensor, part: FP8Base, x: Any, format: BlockFormat) -> Tensor:
    """Enter the scales of a frozen part into the table of all; return the bytes of the part."""
    data, held = frozen_parts(part)
    for region in scale_regions(x, part, format):
        table[region.slices] = region.of(held).to(table.device)
    return data


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
        return [region.in_blocks(format) for region in regions_of(x)]
    # It has the scales of all that its group of FSDP shards, whose placements come first.
    for count in range(len(x.placements) + 1):
        regions = list(regions_of(x, count))
        blocks = regions[0].blocks(format) if len(regions) == 1 else ()
        if [each.stop - each.start for each in blocks] == list(part.scale.shape):
            return [Region(tuple(Piece(each.start, 0, each.stop - each.start) for each in blocks))]
    raise AssertionError(f"{tuple(part.scale.shape)} scales of {tuple(x.shape)}, {x.placements}")


def regions_of(x: Any, skip: int = 0) -> Iterator[Region]:
    """Cut a DTensor's local part into regions; it has several if a rank gets parts of halves.

    Without the first ``skip`` placements: as if the tensor were whole along these dimensions of the
    mesh.
    """
    placements = x.placements[skip:]
    pieces = [list(_pieces(x, dim, placements)) for dim in range(x.ndim)]
    return map(Region, itertools.product(*pieces))


def _pieces(x: Any, dim: int, placements: Sequence[Any]) -> Iterator[Piece]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def along(placement: Any) -> Any:
        if getattr(placement, "dim", None) not in (dim, dim - x.ndim):
            return Replicate()
        factor = getattr(placement, "split_factor", None)
        return Shard(0) if factor is None else type(placement)(0, split_factor=factor)

    # torch cuts the indices as it has cut the tensor, without communication
    indices = torch.arange(x.shape[dim])
    kept = [Replicate()] * (len(x.placements) - len(placements)) + [*map(along, placements)]
    cut = distribute_tensor(indices, x.device_mesh, kept, src_data_rank=None)
    held: Sequence[int] = local_of(cut).tolist()  # type: ignore[union-attr]
    first = 0
    for at in range(1, len(held) + 1):
        if at == len(held) or held[at] != held[at - 1] + 1:
            yield Piece(held[first], first, at - first)
            first = at


def _max_over_ranks(table: Tensor, x: Any) -> None:
    """Reduce entries of which ranks have some, and zeros for the rest."""
    for index, placement in enumerate(x.placements):
        if not placement.is_replicate() and x.device_mesh.size(index) > 1:
            # as integers, magnitudes keep their order, with NaN above Inf
            group = x.device_mesh.get_group(index)
            dist.all_reduce(table.view(torch.int32), dist.ReduceOp.MAX, group)


def _full(as_bytes: Tensor, x: Any) -> Tensor:
    """Gather the bytes of a tensor that is cut as ``x`` is; gloo does not support e4m3."""
    from torch.distributed.tensor import DTensor

    strides = torch.empty(x.shape, device="meta").stride()
    cut = DTensor.from_local(
        as_bytes, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=strides
    )
    return cut.full_tensor()
