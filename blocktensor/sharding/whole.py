"""Gather whole tensors, of which ranks hold parts: FP8 weights as e4m3 bytes.

It serves every DTensor, whoever cut it (FSDP2, tensor or expert parallelism, or several of them),
with trainable and frozen local parts. What travels is one byte an element, and 4 bytes a block. A
block may lie on several ranks: its scale is that of the whole block, as in a forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.cast.ops import quantize_rowwise, quantize_shard, shard_amax
from ..ops.formats import BlockFormat, Quantized, ceil_div
from ..ops.reference import scale_from_amax
from ..tensor.base import FP8Base, MasterBase
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from .cuts import Cut, Piece, Region, frozen_parts, pieces_of, regions, regions_of, scale_regions
from .dtensor import local_of

_ALIGNMENT = 16
"""Tensors begin at multiples of it in what a rank sends, to be viewed in their dtypes."""


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


def form_of(x: FP8Base) -> Quantized:
    """Return the rowwise form of an FP8 weight that is no DTensor."""
    if isinstance(x, BlockwiseFP8Tensor):
        return x.rowwise()
    return quantize_rowwise(x.master.detach(), format_of(x))  # type: ignore[attr-defined]


def whole_tensors(
    tensors: Sequence[Any], check: Callable[[int, Tensor, BlockFormat], None]
) -> Iterator[Quantized | Tensor | None]:
    """Yield whole tensors in turn: the forms of FP8 weights, and the values of other DTensors.

    None for a tensor that is no DTensor. All ranks of the meshes must exhaust it, for the same
    tensors in the same order; each gets all, on the mesh's device. The forms are the bytes that the
    next forward multiplies by.

    Scales of all sharded weights are made first, and given to ``check``: the index of the tensor,
    and the scales on the CPU. Then tensors are gathered in batches of at most the size of the
    largest FP8 weight, or of one tensor; one batch is on its way while another is in use.
    """
    items = [*map(_item, tensors)]
    weights = {i: item for i, item in enumerate(items) if isinstance(item, _Weight)}
    _make_tables([*weights.values()])
    for i, weight in weights.items():
        check(i, weight.scales(weight.on_cpu), weight.format)
    limit = max((weight.x.numel() for weight in weights.values()), default=0)
    made = _gathered([item for item in items if item is not None], limit)
    for item in items:
        yield None if item is None else next(made)


class _Item:
    """A DTensor to gather; ``dtype``: of what is sent."""

    def __init__(self, x: Any) -> None:
        self.x, self.cut = x, Cut.of(x)
        self.dtype: torch.dtype = x.dtype

    def write(self, part: Tensor) -> None:
        """Write what this rank sends into ``part``, which has the shape of its local part."""
        part.copy_(local_of(self.x).detach())  # type: ignore[union-attr]

    def whole(self, values: Tensor) -> Quantized | Tensor:
        """Return what is yielded of it."""
        return values


class _Weight(_Item):
    """A sharded weight in FP8.

    Attributes:
        part, format: its local part, and the format of that.
        master: the local part in high precision; None if the weight is frozen.
        table, on_cpu: one fp32 number for each block: its amax, or its scale if frozen.
    """

    table: Tensor
    on_cpu: Tensor

    def __init__(self, x: Any, part: FP8Base) -> None:
        super().__init__(x)
        self.part, self.format, self.dtype = part, format_of(part), torch.uint8
        self.master = part.master.detach() if isinstance(part, MasterBase) else None

    def fill(self, table: Tensor) -> None:
        """Enter this rank's numbers into the table."""
        self.table = table
        if self.master is None:
            _, scale = frozen_parts(self.part)
            for region in scale_regions(self.x, self.part, self.format):
                table[region.slices] = region.of(scale).to(table.device)
        for region, rows in self._regions():
            blocks = table[region.blocks(self.format)]
            amax = shard_amax(rows, self.format, *region.offsets(self.format))
            blocks.copy_(torch.maximum(blocks, amax))

    def write(self, part: Tensor) -> None:
        if self.master is None:
            part.copy_(frozen_parts(self.part)[0].view(torch.uint8))
        for region, rows in self._regions():
            amax, place = self.table[region.blocks(self.format)], region.offsets(self.format)
            cast = quantize_shard(rows, amax, self.format, *place)
            region.of(part).copy_(cast.view(torch.uint8))

    def whole(self, values: Tensor) -> Quantized:
        return Quantized(values.view(self.format.dtype), self.scales(self.table), self.format)

    def scales(self, table: Tensor) -> Tensor:
        """Return the scales of the blocks in a table."""
        return table if self.master is None else scale_from_amax(table, self.format)

    def _regions(self) -> Iterator[tuple[Region, Tensor]]:
        """Yield the regions of the master, each with its values."""
        if self.master is not None and self.master.numel():
            master = self.master.to(self.cut.device)
            for region in regions_of(self.x):
                yield region, region.of(master)


def _item(x: Any) -> _Item | None:
    part = fp8_of(x)
    if local_of(x) is None:
        return None
    return _Item(x) if part is None else _Weight(x, part)


def _make_tables(weights: Sequence[_Weight]) -> None:
    """Make the tables of all blocks, by one reduction for all weights that are cut alike."""
    for cut in dict.fromkeys(item.cut for item in weights):
        alike = [item for item in weights if item.cut == cut]
        shapes = [item.format.scale_shape(item.x.shape) for item in alike]
        sizes = [math.prod(shape) for shape in shapes]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=cut.device)
        for item, table, shape in zip(alike, flat.split(sizes), shapes, strict=True):
            item.fill(table.view(shape))
        for dim in cut.dims:
            # as integers, magnitudes keep their order, with NaN above Inf
            dist.all_reduce(flat.view(torch.int32), dist.ReduceOp.MAX, cut.mesh.get_group(dim))
        for item, table in zip(alike, flat.cpu().split(sizes), strict=True):
            item.on_cpu = table.view(item.table.shape)


def _gathered(items: Sequence[_Item], limit: int) -> Iterator[Quantized | Tensor]:
    """Yield all items whole, in batches of at most ``limit`` bytes, or of one item."""
    ahead: Callable[[], Iterator[Quantized | Tensor]] | None = None
    for batch in _batches(items, limit):
        receive = _send(batch)
        if ahead is not None:
            yield from ahead()
        ahead = receive
    if ahead is not None:
        yield from ahead()


def _batches(items: Sequence[_Item], limit: int) -> Iterator[list[_Item]]:
    """Divide items into runs that are cut alike and have at most ``limit`` bytes, or one item."""
    batch: list[_Item] = []
    size = 0
    for item in items:
        more = item.x.numel() * item.dtype.itemsize
        if batch and (item.cut != batch[0].cut or size + more > limit):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += more
    if batch:
        yield batch


class _Slot(NamedTuple):
    """Where a rank's part of a tensor is: among the bytes that it sends, and in the whole."""

    start: int
    dtype: torch.dtype
    pieces: list[list[Piece]]

    @property
    def shape(self) -> list[int]:
        return [sum(piece.size for piece in along) for along in self.pieces]

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def of(self, sent: Tensor) -> Tensor:
        """Return the view of the part in what a rank sends."""
        return sent[self.start : self.end].view(self.dtype).view(self.shape)


def _slots(batch: Sequence[_Item], coordinate: Sequence[int]) -> list[_Slot]:
    """Return where all parts are of the rank at ``coordinate``."""
    slots: list[_Slot] = []
    for item in batch:
        start = ceil_div(slots[-1].end, _ALIGNMENT) * _ALIGNMENT if slots else 0
        slots.append(_Slot(start, item.dtype, pieces_of(item.x, coordinate)))
    return slots


def _send(batch: Sequence[_Item]) -> Callable[[], Iterator[Quantized | Tensor]]:
    """Cast this rank's parts and begin to gather; return what waits, and yields the whole items."""
    cut = batch[0].cut
    ranks = [_slots(batch, coordinate) for coordinate in cut.coordinates()]
    size = ceil_div(max(slots[-1].end for slots in ranks), _ALIGNMENT) * _ALIGNMENT
    sent = torch.empty(size, dtype=torch.uint8, device=cut.device)
    for item, slot in zip(batch, _slots(batch, cut.mesh.get_coordinate()), strict=True):
        item.write(slot.of(sent))
    work: Any = None
    for dim in reversed(cut.dims):
        if work is not None:
            work.wait()
        whole = sent.new_empty(cut.mesh.size(dim) * sent.numel())
        work = dist.all_gather_into_tensor(whole, sent, cut.mesh.get_group(dim), async_op=True)
        sent = whole

    def receive() -> Iterator[Quantized | Tensor]:
        if work is not None:
            work.wait()
        received = sent.view(len(ranks), size)
        for i, item in enumerate(batch):
            values = torch.empty(item.x.shape, dtype=item.dtype, device=cut.device)
            for slots, bytes in zip(ranks, received, strict=True):
                part = slots[i].of(bytes)
                for region in regions(slots[i].pieces):
                    values[region.slices].copy_(region.of(part))
            yield item.whole(values)

    return receive
