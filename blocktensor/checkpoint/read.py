"""Read stored tensors into the part of a tensor that a rank holds, and no more of the files.

safetensors maps files into memory, so that only the pages that are copied are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.checks import bad_scale
from ..ops.formats import BLOCK, BLOCKS_128X128, BlockFormat
from ..ops.reference import scaled
from ..recipe import DEFAULT_RECIPE, Recipe
from ..sharding.cuts import frozen_like, frozen_parts, frozen_twin, held
from ..sharding.dtensor import cut_as, fp8_part, local_of, own_part, with_local
from ..sharding.fsdp.shards import FP8Shard
from ..sharding.part import max_over_ranks
from ..tensor.base import MasterBase
from ..tensor.weight import BlockwiseFP8Weight
from .contents import Entry
from .files import Read
from .match import Source
from .on_disk import CheckpointError
from .parts import Box, Part, all_of, blocks_of

_AT_ONCE = 1 << 24
"""Most elements that are dequantized together, in fp32 copies."""


class Copy(NamedTuple):
    """A stored box that is to be copied into the memory of this rank.

    Attributes:
        into: its indices in the memory.
        part: its shape there.
        data: the box, mapped from its file.
        scale: the fp32 scale of each block in which the box lies; None copies ``data``.
    """

    into: Box
    part: Part
    data: Tensor
    scale: Tensor | None = None

    def write(self, memory: Tensor) -> None:
        """Copy the values of the box into ``memory``."""
        target = memory[self.into]
        values = self.data
        if self.scale is not None:
            values = _values(values.to(target.device), self.scale, self.part.there, target.dtype)
        target.copy_(self.part.arrange(values))


def _values(data: Tensor, scale: Tensor, box: Box, dtype: torch.dtype) -> Tensor:
    """Return ``data * scale`` of a box of a stored weight, which may cut blocks."""
    scale = scale.to(data.device)
    rows, cols = (
        torch.arange(x.start, x.stop, device=data.device) // BLOCK - x.start // BLOCK
        for x in box[-2:]
    )
    made = torch.empty(data.shape, dtype=dtype, device=data.device)
    step = max(1, _AT_ONCE // max(1, data[..., :1, :].numel()))
    for first in range(0, len(rows), step):
        some = slice(first, first + step)
        scales = scale.index_select(-2, rows[some]).index_select(-1, cols)
        made[..., some, :] = scaled(data[..., some, :], scales, dtype)
    return made


def check_cut(name: str, x: Any, source: Source, recipe: Recipe | None, *, is_frozen: bool) -> None:
    """Raise NotImplementedError if a stored tensor cannot be read into the model's.

    ``is_frozen``: whether it becomes a frozen FP8 weight.
    """
    part, is_cut = fp8_part(x), local_of(x) is not None
    if is_cut and is_frozen and part is None:
        raise NotImplementedError(
            f"{name} is stored in FP8, the model's is sharded in {x.dtype}: convert the model "
            f"before it is sharded, or load before; trainable=True loads its values in {x.dtype}"
        )
    own = getattr(part, "recipe", None)
    keeps = part is not None and (is_cut or not is_frozen)
    if source.is_fp8 and keeps and recipe not in (None, own):
        what = "is sharded" if is_cut else "is trainable and was converted"
        raise NotImplementedError(
            f"{name} {what} with {own}: load before the model is sharded for another recipe, or "
            f"convert it with that"
        )
    if is_cut and is_frozen:
        try:
            frozen_parts(frozen_twin(x))
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{name}: {error}; trainable=True loads a master of any part"
            ) from None


def read_values(x: Tensor, source: Source, device: torch.device, read: Read) -> Tensor | list[Copy]:
    """Return a new tensor for the place of ``x``, or what :func:`write_values` copies into it.

    A new tensor has its own memory: else a write to the file would change the model. A weight that
    is stored in FP8 is dequantized.
    """
    copies = [*_copies(x, source.weights, source.parts, read, source.scales)]
    if not x.is_meta:
        return copies
    memory = torch.empty(own_part(x).shape, dtype=x.dtype, device=device)
    for copy in copies:
        copy.write(memory)
    part: Any = own_part(x)
    if isinstance(part, FP8Shard):
        memory = FP8Shard(memory, part.recipe)
    elif isinstance(part, BlockwiseFP8Weight):
        memory = BlockwiseFP8Weight(memory, part.recipe)
    return memory if part is x else with_local(x, memory)


def read_frozen(
    x: Tensor,
    source: Source,
    device: torch.device,
    recipe: Recipe | None,
    read: Read,
    *,
    own_scales: bool,
) -> Tensor:
    """Return the stored frozen weight, or this rank's part of it.

    ``own_scales``: read the scales of only those blocks in which the part lies; zeros stand for
    the others, until :func:`share_scales`.
    """
    own: Recipe = getattr(fp8_part(x), "recipe", DEFAULT_RECIPE)
    chosen = recipe or own
    format = chosen.weight_format
    home = device if x.is_meta else x.device
    x = frozen_twin(x)
    if local_of(x) is None:
        data = torch.empty(x.shape, dtype=format.dtype, device=home)
        shape = format.scale_shape(x.shape)
        scale = torch.empty(shape, dtype=torch.float32, device=home)
    else:
        data, scale = (_empty_as(part, home) for part in frozen_parts(x))

    shapes = {entry: weight.shape for entry, weight in source.scaled}

    def read_scales(entry: Entry, box: Box) -> Tensor:
        return _scales(entry, shapes[entry], box, format, read)

    for copy in _copies(data, source.weights, source.parts, read):
        copy.write(own_part(data))
    scales = [*zip(source.scales, source.blocks(x.shape), strict=True)]
    if own_scales:
        own_part(scale).zero_()
        mine = [blocks_of(region.slices) for region in held(data).regions]
        cut = [(entry, part.within(blocks)) for entry, part in scales for blocks in mine]
        scales = [(entry, part) for entry, part in cut if part is not None]
    entries, parts = [entry for entry, _ in scales], [part for _, part in scales]
    for copy in _copies(scale, entries, parts, read_scales):
        copy.write(own_part(scale))
    return frozen_like(x, data, scale, chosen)


def share_scales(x: Tensor) -> None:
    """Give the scales of all blocks to the ranks that keep them and have read some of them.

    Ranks of FSDP2 keep all scales of a weight, of which each holds some rows. All ranks call it.
    """
    if local_of(x) is None:
        return
    data, scale = frozen_parts(x)
    memory, mesh = own_part(scale), data.device_mesh  # type: ignore[attr-defined]
    cuts = zip(data.placements, scale.placements, strict=True)  # type: ignore[attr-defined]
    for dim, (of_data, of_scale) in enumerate(cuts):
        if of_scale.is_replicate() and not of_data.is_replicate():
            sent = memory.to(mesh.device_type, copy=True)
            memory.copy_(max_over_ranks(sent, mesh.get_group(dim)))


def _scales(
    entry: Entry, weight: Sequence[int], box: Box, format: BlockFormat, read: Read
) -> Tensor:
    """Return the stored scales of a box of blocks of a weight of this shape, checked."""
    shape = format.scale_shape(weight)
    if entry.shape == shape:
        scales = read(entry, box).float()
    else:  # with other dimensions of size 1
        scales = read(entry, all_of(entry.shape)).float().view(shape)[box]
    problem = bad_scale(scales, format, [run.start for run in box])
    if problem is not None:
        raise CheckpointError(f"{entry}: {problem}")
    return scales


def _empty_as(x: Any, device: torch.device) -> Tensor:
    """Return a DTensor that is cut as ``x`` is, without values."""
    contiguous = torch.contiguous_format
    memory = torch.empty_like(own_part(x), device=device, memory_format=contiguous)
    return cut_as(x, memory, x.placements)


@torch.no_grad()
def write_values(x: Tensor, copies: Sequence[Copy]) -> None:
    """Copy stored values into a tensor, or into the master of a weight."""
    part, into = fp8_part(x), own_part(x)
    if isinstance(part, MasterBase):
        part._before_write()
        into = part.master
    for copy in copies:
        copy.write(into)


def _copies(
    x: Tensor,
    entries: Sequence[Entry],
    parts: Sequence[Part],
    read: Read,
    scales: Sequence[Entry] = (),
) -> Iterator[Copy]:
    """Yield what this rank copies into its part of ``x``.

    Args:
        x: a plain tensor or a DTensor.
        entries, parts: the stored tensors, and where they are in all of ``x``.
        read: a function that reads the stored tensors.
        scales: the scales of each stored tensor, by which it is dequantized; default: it is not.
    """
    for region in held(x).regions:
        for i, (entry, whole) in enumerate(zip(entries, parts, strict=True)):
            part = whole.within(region.slices)
            if part is None:
                continue
            into = tuple(
                slice(run.start - p.start + p.local, run.stop - p.start + p.local)
                for run, p in zip(part.here, region.pieces, strict=True)
            )
            data, scale = read(entry, part.there), None
            if scales:
                blocks = blocks_of(part.there)
                scale = _scales(scales[i], entry.shape, blocks, BLOCKS_128X128, read)
            yield Copy(into, part, data, scale)
