"""Read stored tensors into the part of a tensor that a rank holds, and no more of the files.

safetensors maps files into memory, so that only the pages that are copied are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from ..tensor.base import MasterBase
from ..tensor.weight import BlockwiseFP8Weight
from .contents import Entry
from .match import Source
from .on_disk import CheckpointError
from .parts import Box, Part, all_of

Read = Callable[[Entry, Box], Tensor]
"""A function that returns a box of a stored tensor, mapped from its file."""

_AT_ONCE = 1 << 24
"""Most elements that are dequantized together, in fp32 copies."""


class Copy(NamedTuple):
    """A stored box that is to be copied into the memory of this rank.

    Attributes:
        into: its indices in the memory.
        part: its shape there.
        data: the box, mapped from its file.
        scale: the fp32 scale of each block of the whole stored weight; None copies ``data``.
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
    scale = scale.to(data.device)[box[:-2]]
    rows, cols = (torch.arange(x.start, x.stop, device=data.device) // BLOCK for x in box[-2:])
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
    scales = [_scales(entry, weight.shape, BLOCKS_128X128, read) for entry, weight in source.scaled]
    copies = [*_copies(x, source.weights, source.parts, read, scales)]
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
    x: Tensor, source: Source, device: torch.device, recipe: Recipe | None, read: Read
) -> Tensor:
    """Return the stored frozen weight, or this rank's part of it."""
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
        return _scales(entry, shapes[entry], format, read)[box]

    for copy in _copies(data, source.weights, source.parts, read):
        copy.write(own_part(data))
    for copy in _copies(scale, source.scales, source.blocks(x.shape), read_scales):
        copy.write(own_part(scale))
    return frozen_like(x, data, scale, chosen)


def _scales(entry: Entry, weight: Sequence[int], format: BlockFormat, read: Read) -> Tensor:
    """Return all stored scales of a weight of this shape, checked.

    Every rank checks all scales of the weight, so that the error names the block of a bad scale.
    """
    stored = read(entry, all_of(entry.shape))
    scales = stored.float().view(format.scale_shape(weight))
    problem = bad_scale(scales, format)
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
    scales: Sequence[Tensor] = (),
) -> Iterator[Copy]:
    """Yield what this rank copies into its part of ``x``.

    Args:
        x: a plain tensor or a DTensor.
        entries, parts: the stored tensors, and where they are in all of ``x``.
        read: a function that reads the stored tensors.
        scales: of the stored tensors, by which they are dequantized; default: they are not.
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
            yield Copy(into, part, read(entry, part.there), scales[i] if scales else None)
