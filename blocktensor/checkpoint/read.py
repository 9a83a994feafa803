"""Read stored tensors into the part of a tensor that a rank holds, and no more of the files.

safetensors maps files into memory, so that only the pages that are copied are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.checks import bad_scale
from ..recipe import DEFAULT_RECIPE, Recipe
from ..sharding.cuts import frozen_like, frozen_parts, held
from ..sharding.dtensor import cut_as, fp8_part, local_of, own_part
from ..tensor.base import MasterBase
from ..tensor.weight import BlockwiseFP8Weight
from .contents import Entry
from .match import Source
from .on_disk import CheckpointError
from .parts import Part

Read = Callable[[Entry], Tensor]
"""A function that returns a stored tensor, mapped from its file."""


def check_cut(name: str, x: Any, source: Source, recipe: Recipe | None) -> None:
    """Raise NotImplementedError if a stored tensor cannot be read into a sharded one."""
    part = fp8_part(x)
    if x.is_meta:
        raise NotImplementedError(
            f"{name} is sharded and on the meta device: give it memory first "
            f"(model.to_empty(device=...)), or load before the model is sharded"
        )
    if source.is_fp8 and part is None:
        raise NotImplementedError(
            f"{name} is stored in FP8, the model's is sharded in {x.dtype}: convert and freeze the "
            f"model before it is sharded, or load before"
        )
    own = getattr(part, "recipe", None)
    if source.is_fp8 and recipe is not None and recipe != own:
        raise NotImplementedError(
            f"{name} is sharded with {own}: load before the model is sharded for another recipe"
        )


def read_values(
    x: Tensor, source: Source, device: torch.device, recipe: Recipe | None, read: Read
) -> Tensor | list[Tensor]:
    """Return a new tensor for the place of ``x``, or what :func:`write_values` copies into it.

    A new tensor has its own memory: else a write to the file would change the model.
    """
    if source.is_fp8:
        return _read_frozen(x, source, device, recipe, read)
    if not x.is_meta:
        return [read(entry) for entry in source.weights]
    value = torch.empty(x.shape, dtype=x.dtype, device=device)
    _fill(value, source.weights, source.parts, read)
    return BlockwiseFP8Weight(value, x.recipe) if isinstance(x, BlockwiseFP8Weight) else value


def _read_frozen(
    x: Tensor, source: Source, device: torch.device, recipe: Recipe | None, read: Read
) -> Tensor:
    """Return the stored frozen weight, or this rank's part of it."""
    own: Recipe = getattr(fp8_part(x), "recipe", DEFAULT_RECIPE)
    chosen = recipe or own
    format = chosen.weight_format
    shape = format.scale_shape(x.shape)

    shapes = {
        entry: format.scale_shape(weight.shape)
        for entry, weight in zip(source.scales, source.weights, strict=True)
    }

    def read_scales(entry: Entry) -> Tensor:
        scales = read(entry).float().view(shapes[entry])
        problem = bad_scale(scales, format)
        if problem is not None:
            raise CheckpointError(f"{entry}: {problem}")
        return scales

    if local_of(x) is None:
        home = device if x.is_meta else x.device
        data = torch.empty(x.shape, dtype=format.dtype, device=home)
        scale = torch.empty(shape, dtype=torch.float32, device=home)
    else:
        data, scale = map(_empty_as, frozen_parts(x))
    _fill(data, source.weights, source.parts, read)
    _fill(scale, source.scales, source.blocks(x.shape), read_scales)
    return frozen_like(x, data, scale, chosen)


def dequantized(x: Tensor, source: Source, read: Read) -> Tensor:
    """Return the values of the whole stored FP8 weight of ``x``, on the CPU."""
    plain = torch.empty(x.shape, dtype=x.dtype, device="meta")
    made: Any = _read_frozen(plain, source, torch.device("cpu"), DEFAULT_RECIPE, read)
    values: Tensor = made.dequantize()
    return values


def _empty_as(x: Any) -> Tensor:
    """Return a DTensor that is cut as ``x`` is, without values."""
    memory = torch.empty_like(own_part(x), memory_format=torch.contiguous_format)
    return cut_as(x, memory, x.placements)


@torch.no_grad()
def write_values(x: Tensor, source: Source, values: Sequence[Tensor]) -> None:
    """Copy the values of a source into a plain tensor, or into the master of a weight."""
    part, into = fp8_part(x), own_part(x)
    if isinstance(part, MasterBase):
        part._before_write()
        into = part.master
    stored = dict(zip(source.weights, values, strict=True))
    _fill(x, source.weights, source.parts, stored.__getitem__, into)


def _fill(
    x: Tensor,
    entries: Sequence[Entry],
    parts: Sequence[Part],
    read: Read,
    into: Tensor | None = None,
) -> None:
    """Copy the part of ``x`` that this rank holds from the stored parts.

    Args:
        x: a plain tensor or a DTensor.
        entries, parts: the stored tensors, and where they are in all of ``x``.
        into: the memory to write; default: the memory of ``x``.
    """
    memory = own_part(x) if into is None else into
    for region in held(x).regions:
        for entry, part in zip(entries, parts, strict=True):
            both = [
                (max(mine.start, theirs.start), min(mine.stop, theirs.stop))
                for mine, theirs in zip(region.slices, part.here, strict=True)
            ]
            if any(begin >= end for begin, end in both):
                continue
            source = tuple(
                slice(begin - each.start, end - each.start)
                for (begin, end), each in zip(both, part.here, strict=True)
            )
            target = tuple(
                slice(begin - p.start + p.local, end - p.start + p.local)
                for (begin, end), p in zip(both, region.pieces, strict=True)
            )
            memory[target].copy_(part.take(read(entry))[source])
