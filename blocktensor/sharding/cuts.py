"""Find where the parts of a DTensor on all ranks lie in the whole, whoever cut it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.formats import BLOCKS_128X128, ceil_div
from ..recipe import Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .dtensor import cut_as, own_part, refuse_descending, with_local
from .fsdp.fsdp_internals import gathered_shape
from .fsdp.gather import GatheredInFP8
from .fsdp.shards import FP8Shard, FrozenShard
from .part import Piece, Region


class Held(NamedTuple):
    """The part of a DTensor that a rank holds; several regions if halves are cut separately."""

    shape: tuple[int, ...]
    regions: list[Region]


def held_by_ranks(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> list[Held]:
    """Return what each rank of a mesh holds of a DTensor, in the order of the mesh."""
    refuse_descending(mesh)
    sizes = [mesh.size(i) for i in range(mesh.ndim)]

    def parts(placement: Any, dim: int) -> int:
        if placement.is_replicate() or placement.dim % len(shape) != dim:
            return 0
        # the number of parts that are cut between ranks separately
        return int(getattr(placement, "split_factor", 1))

    along = [
        _pieces(size, tuple((sizes[i], parts(p, dim)) for i, p in enumerate(placements)))
        for dim, size in enumerate(shape)
    ]
    return [
        Held(
            tuple(sum(piece.size for piece in each[rank]) for each in along),
            [Region(pieces) for pieces in itertools.product(*(each[rank] for each in along))],
        )
        for rank in range(math.prod(sizes))
    ]


def held(x: Any) -> Held:
    """Return the part of a tensor that this rank holds; a plain tensor is held whole."""
    if own_part(x) is x:
        return Held(tuple(x.shape), [Region(tuple(Piece(0, 0, size) for size in x.shape))])
    mesh = x.device_mesh
    (rank,) = ranks_at(mesh, mesh.get_coordinate())
    return held_by_ranks(x.shape, mesh, x.placements)[rank]


def ranks_at(mesh: Any, coordinate: Sequence[int | slice]) -> list[int]:
    """Return the numbers of ranks of the mesh at an index; a slice selects a whole dimension."""
    places = torch.arange(mesh.size(), device="cpu").view(mesh.shape)
    return places[tuple(coordinate)].reshape(-1).tolist()


@functools.cache
def _pieces(size: int, cuts: tuple[tuple[int, int], ...]) -> list[list[Piece]]:
    """Return what each rank holds of ``size`` indices, in the mesh's order of ranks.

    ``cuts``: for each dimension of the mesh its size, and the number of parts that it cuts; 0 if
    its ranks hold equal values.
    """
    held = [torch.arange(size, device="cpu")]  # whatever the default device is
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
    """Cut a vector as DTensor does: the last chunks may be shorter or empty."""
    step = ceil_div(len(x), count)
    return [x[i * step : (i + 1) * step] for i in range(count)]


def _runs(indices: Sequence[int]) -> Iterator[Piece]:
    first = 0
    for at in range(1, len(indices) + 1):
        if at == len(indices) or indices[at] != indices[at - 1] + 1:
            yield Piece(indices[first], first, at - first)
            first = at


def frozen_twin(x: Any) -> Tensor:
    """Return a DTensor on meta that is cut as a trainable one is, with a frozen local part.

    All other tensors are returned themselves.
    """
    part: Any = own_part(x)
    if part is x or not isinstance(part, (FP8Shard, BlockwiseFP8Weight)):
        whole: Tensor = x
        return whole
    format = part.recipe.weight_format
    data = torch.empty(part.shape, dtype=format.dtype, device="meta")
    gathered = gathered_shape(part) if isinstance(part, FP8Shard) else None
    shape = format.scale_shape(gathered or part.shape)
    scale = torch.empty(shape, dtype=torch.float32, device="meta")
    return frozen_like(x, data, scale, part.recipe)


def frozen_like(x: Any, data: Tensor, scale: Tensor, recipe: Recipe) -> Tensor:
    """Return a frozen weight to replace ``x``, built from parts as in :func:`frozen_parts`."""
    part, rows, scales = map(own_part, (x, data, scale))
    if isinstance(part, GatheredInFP8):
        return with_local(x, FrozenShard(rows, scales, recipe, x.dtype))
    made = BlockwiseFP8Tensor.from_data(
        rows, scales, block_shape=recipe.weight_format.block_shape, dtype=x.dtype, recipe=recipe
    )
    return made if part is x else with_local(x, made)


def frozen_parts(x: Any) -> tuple[Tensor, Tensor]:
    """Return the bytes and scales of a frozen weight, as plain tensors that share its memory.

    For a DTensor they are DTensors. A shard of FSDP2 has the scales of everything that its group
    shards.
    """
    part = own_part(x)
    if isinstance(part, FrozenShard):
        data, scale = part.data_rows, part.scale
    else:
        assert isinstance(part, BlockwiseFP8Tensor)
        row = part.operand.rowwise
        data, scale = row[:2] if row else (t.transpose(-1, -2) for t in part.columnwise()[:2])
    if part is x:
        return data, scale
    from torch.distributed.tensor import Replicate

    cuts, shape = x.placements, BLOCKS_128X128.scale_shape(x.shape)
    # the first placements are FSDP's, which does not cut scales
    for whole in range(len(cuts) if isinstance(part, FrozenShard) else 0, -1, -1):
        placements = *(Replicate(),) * whole, *cuts[whole:]
        scales = cut_as(x, scale, placements, shape)
        if held(scales).shape == scale.shape:
            check_on_grid(x.shape, x.device_mesh, placements, "a frozen FP8 weight", TRAINABLE)
            return cut_as(x, data, cuts), scales
    raise _cuts_blocks(x.shape, cuts, "a frozen FP8 weight", TRAINABLE)


TRAINABLE = "or a trainable weight"
"""The remedy for a frozen weight whose blocks are cut."""

UNCONVERTED = "cuts between experts (Shard(0)), or the stack unconverted (skip=[...])"
"""The remedy for a stack of experts whose blocks are cut."""


def check_on_grid(
    shape: Sequence[int], mesh: Any, placements: Sequence[Any], what: str, remedy: str
) -> None:
    """Check that no rank would hold a part of a 128x128 block; all ranks decide alike.

    Args:
        shape, mesh, placements: of the DTensor.
        what, remedy: for the error message.

    Raises:
        NotImplementedError: a rank would, or a placement is neither a cut nor a replica.
    """
    for placement in placements:
        if not (placement.is_replicate() or hasattr(placement, "dim")):
            raise NotImplementedError(
                f"{what} {list(shape)} with the placement {placement}: expected Shard(dim) or "
                f"Replicate(), {remedy}"
            )
    block = (1,) * (len(shape) - 2) + BLOCKS_128X128.block_shape
    for each in held_by_ranks(shape, mesh, placements):
        for region in each.regions:
            for piece, step, size in zip(region.pieces, block, shape, strict=True):
                ends = piece.start + piece.size
                if piece.size and (piece.start % step or (ends % step and ends != size)):
                    raise _cuts_blocks(shape, placements, what, remedy)


def _cuts_blocks(
    shape: Sequence[int], placements: Sequence[Any], what: str, remedy: str
) -> NotImplementedError:
    return NotImplementedError(
        f"{what} {list(shape)} with the placements {list(placements)}, which cut 128x128 blocks: "
        f"expected cuts at multiples of 128 (fewer ranks), {remedy}"
    )
