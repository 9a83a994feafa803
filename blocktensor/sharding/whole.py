"""Gather whole tensors from the parts of ranks, FP8 weights as e4m3 bytes.

It works for every DTensor, whoever cut it (FSDP2, tensor or expert parallelism, or several of
them), with trainable and frozen local parts. Ranks send one byte for each element and 4 bytes for
each block. A block may lie on several ranks; it has the scale of the whole block, as in a forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.cast.ops import quantize_rowwise
from ..ops.formats import BlockFormat, Quantized, ceil_div
from ..ops.reference import scale_from_amax
from ..tensor.base import MasterBase
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from .cuts import frozen_parts, held, held_by_ranks, ranks_at
from .dtensor import fp8_part, local_of, own_part
from .part import Part, check_groups, max_over_ranks

_BATCH = 4
"""Most bytes in a batch, in multiples of the largest weight, and in all: two batches of one
Transformer layer each take as much memory as a layer in bf16."""
_BATCH_BYTES = 256 << 20

_all_gather: Any = torch.ops._c10d_functional.all_gather_into_tensor

_ALIGNMENT = 16
"""Alignment of tensors in the sent bytes, so that they can be viewed in their dtypes."""


def form_of(x: Any) -> Quantized:
    """Return the rowwise form of an FP8 weight that is not a DTensor."""
    if isinstance(x, BlockwiseFP8Tensor):
        return x.rowwise()
    return quantize_rowwise(x.master.detach(), x.format)


def whole_tensors(
    tensors: Sequence[Any], check: Callable[[int, Tensor, BlockFormat], None]
) -> Iterator[Quantized | Tensor | None]:
    """Yield the whole forms of FP8 weights and the whole values of other DTensors, in order.

    Other tensors give None. All ranks of the meshes must exhaust the iterator, with the same
    tensors in the same order; each rank gets all, on the mesh's device. The forms have the bytes
    that the next forward reads.

    First, the scales of all sharded weights are computed and passed to ``check``: the index of the
    tensor, and the scales on the CPU. Then tensors are gathered in batches of one tensor, or of at
    most four times the bytes of the largest weight and 256 MiB; each batch is gathered while the
    previous one is in use.
    """
    layouts: dict[Any, _Layout] = {}
    items = [None if local_of(x) is None else _item(x, layouts) for x in tensors]
    weights = {i: item for i, item in enumerate(items) if isinstance(item, _Weight)}
    _make_scales([*weights.values()])
    for i, weight in weights.items():
        check(i, weight.scale_on_cpu, weight.format)
    largest = max((weight.x.numel() for weight in weights.values()), default=0)
    limit = min(_BATCH * largest, _BATCH_BYTES)
    made = _gathered([item for item in items if item is not None], limit)
    for item in items:
        yield None if item is None else next(made)


class _Layout:
    """The cut of DTensors of one shape between ranks.

    Attributes:
        device: the device that sends; FSDP may have moved parts to the CPU.
        groups: the groups of ranks along each dimension of the mesh that cuts them.
        mine: this rank's part.
        ranks: the parts of all ranks along these dimensions, in the order in which they arrive.
    """

    def __init__(self, x: Any) -> None:
        mesh = x.device_mesh
        everybody = held_by_ranks(x.shape, mesh, x.placements)
        placed = enumerate(x.placements)
        dims = [i for i, p in placed if mesh.size(i) > 1 and not p.is_replicate()]
        at = [slice(None) if i in dims else c for i, c in enumerate(mesh.get_coordinate())]
        self.device = torch.device(mesh.device_type)
        self.groups = tuple(mesh.get_group(i) for i in dims)
        self.mine = held(x)
        self.ranks = [everybody[rank] for rank in ranks_at(mesh, at)]


class _Item:
    """A DTensor to gather; ``dtype``: the dtype of the sent bytes."""

    def __init__(self, x: Any, layout: _Layout) -> None:
        self.x, self.layout = x, layout
        self.dtype: torch.dtype = x.dtype

    def part(self) -> Tensor:
        """Return the values that this rank sends, in the shape of its local part."""
        return local_of(self.x).detach().to(self.layout.device)  # type: ignore[union-attr]

    def whole(self, values: Tensor) -> Quantized | Tensor:
        """Return the result that is yielded for the DTensor, given the whole."""
        return values


class _Weight(_Item):
    """A sharded weight in FP8.

    Attributes:
        held, format: its local part, and the format of its casts.
        master: the local part in high precision; None if the weight is frozen.
        amax: the amax of each block; the scale if the weight is frozen.
        scale, scale_on_cpu: the scale of each block.
    """

    amax: Tensor
    scale: Tensor
    scale_on_cpu: Tensor

    def __init__(self, x: Any, layout: _Layout, held: Any) -> None:
        super().__init__(x, layout)
        self.held, self.format, self.dtype = held, held.format, torch.uint8
        self.master = None
        if isinstance(held, MasterBase):
            _check_groups(x, layout, held.format)
            self.master = held.master.detach()

    def fill(self, amax: Tensor) -> None:
        """Write this rank's share into ``amax``."""
        self.amax = amax
        if self.master is None:
            _, scale = frozen_parts(self.x)
            for region in held(scale).regions:
                amax[region.slices] = region.of(own_part(scale)).to(amax.device)
        for part, values in self._parts():
            blocks = amax[part.blocks]
            torch.maximum(blocks, part.amax(values), out=blocks)

    def part(self) -> Tensor:
        if self.master is None:
            data, _ = frozen_parts(self.x)
            return own_part(data).to(self.layout.device).view(torch.uint8)
        casts = [
            (part.region, part.cast(values, self.amax[part.blocks]).view(torch.uint8))
            for part, values in self._parts()
        ]
        if len(casts) == 1:
            return casts[0][1]
        data = torch.empty(self.layout.mine.shape, dtype=torch.uint8, device=self.layout.device)
        for region, cast in casts:
            region.of(data).copy_(cast)
        return data

    def whole(self, values: Tensor) -> Quantized:
        return Quantized(values.view(self.format.dtype), self.scale, self.format)

    def _parts(self) -> Iterator[tuple[Part, Tensor]]:
        """Yield the parts of the weight that the master holds, each with its values."""
        if self.master is not None and self.master.numel():
            master = self.master.to(self.layout.device)
            for region in self.layout.mine.regions:
                yield Part(tuple(self.x.shape), region, self.format), region.of(master)


def _check_groups(x: Any, layout: _Layout, format: BlockFormat) -> None:
    """Check that the parts of all ranks cut no groups of the grid of a format."""
    if format.mxfp4_group is None:
        return
    for part in layout.ranks:
        for region in part.regions:
            for dim, piece in enumerate(region.pieces):
                check_groups(x.shape, dim, piece.start, format)
                check_groups(x.shape, dim, piece.start + piece.size, format)


def _item(x: Any, layouts: dict[Any, _Layout]) -> _Item:
    """Return the item of a DTensor; equal cuts share a layout."""
    key = id(x.device_mesh), x.placements, x.shape
    if key not in layouts:
        layouts[key] = _Layout(x)
    part = fp8_part(x)
    return _Item(x, layouts[key]) if part is None else _Weight(x, layouts[key], part)


def _make_scales(weights: Sequence[_Weight]) -> None:
    """Compute the scales of all whole blocks, by one reduction for all weights of one layout."""
    alike: dict[Any, list[_Weight]] = {}
    for weight in weights:
        key = weight.layout.device, weight.layout.groups, weight.format, weight.master is None
        alike.setdefault(key, []).append(weight)
    for (device, groups, format, is_frozen), some in alike.items():
        shapes = [format.scale_shape(weight.x.shape) for weight in some]
        sizes = [math.prod(shape) for shape in shapes]
        amax = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        for weight, part, shape in zip(some, amax.split(sizes), shapes, strict=True):
            weight.fill(part.view(shape))
        for group in groups:
            max_over_ranks(amax, group)
        scale = amax if is_frozen else scale_from_amax(amax, format)
        parts = zip(some, shapes, scale.split(sizes), scale.cpu().split(sizes), strict=True)
        for weight, shape, part, on_cpu in parts:
            weight.scale, weight.scale_on_cpu = part.view(shape), on_cpu.view(shape)


def _gathered(items: Sequence[_Item], limit: int) -> Iterator[Quantized | Tensor]:
    """Yield the whole tensor of each item, batch by batch."""
    ahead: Callable[[], Iterator[Quantized | Tensor]] | None = None
    receive = None
    try:
        for batch in _batches(items, limit):
            receive = _send(batch)
            if ahead is not None:
                yield from ahead()
            ahead, receive = receive, None
        if ahead is not None:
            yield from ahead()
    finally:
        if receive is not None:  # abandoned: torch keeps what nobody has waited for
            next(receive())


def _batches(items: Sequence[_Item], limit: int) -> Iterator[list[_Item]]:
    """Divide items into runs with equal cuts and at most ``limit`` bytes, or of one item."""
    batch: list[_Item] = []
    size = 0
    for item in items:
        more = item.x.numel() * item.dtype.itemsize
        is_other = item.layout.groups != (batch or [item])[0].layout.groups
        if batch and (is_other or size + more > limit):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += more
    if batch:
        yield batch


def _send(batch: Sequence[_Item]) -> Callable[[], Iterator[Quantized | Tensor]]:
    """Begin to gather parts of any shapes; a rank sends the parts of all items in one buffer."""
    layout = batch[0].layout
    ranks = range(len(layout.ranks))
    sizes = [[_padded_bytes(item, rank) for item in batch] for rank in ranks]
    size = max(map(sum, sizes))
    sent = torch.empty(size, dtype=torch.uint8, device=layout.device)
    at = 0
    for item in batch:
        part = item.part()
        sent[at : at + part.nbytes].view(item.dtype).view(part.shape).copy_(part)
        at += ceil_div(part.nbytes, _ALIGNMENT) * _ALIGNMENT
    for group in reversed(layout.groups):
        sent = _all_gather(_wait(sent), group.size(), group.group_name)

    def receive() -> Iterator[Quantized | Tensor]:
        _wait(sent)
        begins = [rank * size for rank in ranks]
        for i, item in enumerate(batch):
            whole = torch.empty(item.x.shape, dtype=item.dtype, device=sent.device)
            for rank, theirs in enumerate(item.layout.ranks):
                begin = begins[rank]
                count = math.prod(theirs.shape) * item.dtype.itemsize
                part = sent[begin : begin + count].view(item.dtype).view(theirs.shape)
                for region in theirs.regions:
                    whole[region.slices].copy_(region.of(part))
                begins[rank] += sizes[rank][i]
            yield item.whole(whole)

    return receive


def _padded_bytes(item: _Item, rank: int) -> int:
    """Return the bytes that a rank sends for an item, padded so that the next one is aligned."""
    size = math.prod(item.layout.ranks[rank].shape) * item.dtype.itemsize
    return ceil_div(size, _ALIGNMENT) * _ALIGNMENT


def _wait(sent: Tensor) -> Tensor:
    """Make the current stream, not the host, wait for a gathered tensor."""
    made: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return made
