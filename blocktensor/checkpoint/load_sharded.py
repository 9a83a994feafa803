"""Reading into the part of a tensor that a rank holds: no more of the files than that.

safetensors maps files into memory, so that only the pages of what is copied are read. The digests
of tensors are compared by ranks in turn, each for its share of the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.formats import BlockFormat
from ..recipe import Recipe
from ..sharding.cuts import Region, frozen_parts, held, scale_regions
from ..sharding.dtensor import local_of, with_local
from ..sharding.fsdp.shards import FrozenShard
from ..sharding.whole import format_of, fp8_of
from ..tensor.base import MasterBase
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from .contents import Entry
from .match import Source
from .on_disk import CheckpointError, bad_scale

Read = Callable[[Entry], Tensor]
"""Returns a stored tensor, in the file's memory."""


def check_part(name: str, x: Any, source: Source, recipe: Recipe | None) -> None:
    """Raise NotImplementedError if a stored tensor cannot be read into a sharded one."""
    part = fp8_of(x)
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


def read_part(x: Any, source: Source, read: Read) -> tuple[Tensor, ...]:
    """Return new values of this rank's part: bytes and scales, or plain values."""
    part = fp8_of(x)
    if not source.is_fp8:
        local = local_of(x)
        rows = part.master if isinstance(part, MasterBase) else local
        assert rows is not None
        made = torch.empty_like(rows, memory_format=torch.contiguous_format)
        return (_fill(made, held(x).regions, source.weights, source.boxes(x.shape), read),)
    assert part is not None
    format = format_of(part)
    data, scale = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in frozen_parts(part))
    boxes = source.boxes(x.shape)
    _fill(data.view(torch.uint8), held(x).regions, source.weights, boxes, _as_bytes(read))

    def read_scales(entry: Entry) -> Tensor:
        return checked_scales(entry, read, format)

    shape = format.scale_shape(x.shape)
    regions = scale_regions(x, part, format)
    stack = source.stack_scales
    if stack is None:
        return data, _fill(scale, regions, source.scales, source.boxes(shape), read_scales)
    all_scales = format.scale_shape(stack.scaled(x.shape))
    whole = [tuple(slice(0, size) for size in shape)]

    def read_rows(entry: Entry) -> Tensor:
        return stack.rows(read_scales(entry).view(all_scales)).contiguous()

    return data, _fill(scale, regions, [stack.entry], whole, read_rows)


def checked_scales(entry: Entry, read: Read, format: BlockFormat) -> Tensor:
    """Return stored scales in fp32, or raise CheckpointError."""
    scales = read(entry).float()
    problem = bad_scale(scales, format)
    if problem is not None:
        raise CheckpointError(f"{entry}: {problem}")
    return scales


def _as_bytes(read: Read) -> Read:
    return lambda entry: read(entry).view(torch.uint8)


def _fill(
    into: Tensor,
    regions: Sequence[Region],
    entries: Sequence[Entry],
    boxes: Sequence[tuple[slice, ...]],
    read: Read,
) -> Tensor:
    """Copy what ``regions`` of a whole tensor hold of its stored parts, which lie in ``boxes``."""
    for region in regions:
        for entry, box in zip(entries, boxes, strict=True):
            both = [
                (max(mine.start, theirs.start), min(mine.stop, theirs.stop))
                for mine, theirs in zip(region.slices, box, strict=True)
            ]
            if any(begin >= end for begin, end in both):
                continue
            stored = read(entry).view([each.stop - each.start for each in box])
            source = tuple(
                slice(begin - each.start, end - each.start)
                for (begin, end), each in zip(both, box, strict=True)
            )
            target = tuple(
                slice(begin - p.start + p.local, end - p.start + p.local)
                for (begin, end), p in zip(both, region.pieces, strict=True)
            )
            into[target].copy_(stored[source])
    return into


@torch.no_grad()
def assign_part(x: Any, values: tuple[Tensor, ...]) -> Tensor | None:
    """Give a sharded tensor the values of its part; return another tensor that takes its place."""
    part = fp8_of(x)
    if isinstance(part, FrozenShard):
        data, scale = values
        part.data_rows.view(torch.uint8).copy_(data.view(torch.uint8))
        part.scale.copy_(scale)
        return None
    if isinstance(part, BlockwiseFP8Tensor):
        local = BlockwiseFP8Tensor.from_data(
            *values, block_shape=part.block_shape, dtype=part.dtype, recipe=part.recipe
        )
        return with_local(x, local)
    if isinstance(part, MasterBase):
        part._before_write()
        part.master.copy_(values[0])
    else:
        local_of(x).copy_(values[0])  # type: ignore[union-attr]
    return None
