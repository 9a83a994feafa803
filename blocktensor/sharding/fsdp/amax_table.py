"""The block amaxes of all sharded weights of a model, on every rank, by one all-reduce a forward.

A 128x128 block may lie on several ranks. Each rank writes the amax of its share of every block into
a flat table; the maximum over the ranks is the amax of the whole weights. Every rank's cast and the
gathered weight use the scales of this table, which are therefore not gathered.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.cast.ops import quantize_shard, shard_amax
from ...ops.formats import BlockFormat, ceil_div
from ...ops.reference import scale_from_amax
from ...ops.scale_layouts import pad4
from ...recipe import Recipe
from ...tensor.base import MasterBase
from ..ranks import agree
from .fsdp_internals import ShardedParam, sharded_with


@dataclass(frozen=True)
class ShardSlice:
    """The part of a weight that a rank holds, from index ``start`` on along ``dim``.

    ``shape`` is that of the whole weight, ``[..., N, K]``, and ``format`` that of its cast.
    """

    shape: tuple[int, ...]
    dim: int
    start: int
    format: BlockFormat

    @property
    def _side(self) -> int:
        """-2: rows are sharded; -1: columns; below: matrices of a stack."""
        return self.dim - len(self.shape)

    @property
    def offsets(self) -> tuple[int, int]:
        """Rows and columns from the start of its first block to its own start."""
        rows, cols = self.format.block_shape
        return self.start % rows * (self._side == -2), self.start % cols * (self._side == -1)

    def blocks(self, table: Tensor, local: Tensor) -> Tensor:
        """Return the entries of ``table[..., N/128, K/128]`` for the blocks ``local`` lies in."""
        block = 1 if self._side < -2 else self.format.block_shape[self._side]
        first, within = divmod(self.start, block)
        return table.narrow(self.dim, first, ceil_div(within + local.shape[self.dim], block))

    @property
    def entries(self) -> int:
        """Return the entries of a flat table that the weight takes; rows of scales are padded."""
        *rows, cols = self.format.scale_shape(self.shape)
        return math.prod(rows) * pad4(cols)

    def of(self, flat: Tensor, first: int) -> Tensor:
        """View the weight's entries of a flat table, from ``first`` on, without the padding."""
        *rows, cols = self.format.scale_shape(self.shape)
        return flat[first : first + self.entries].view((*rows, pad4(cols)))[..., :cols]


class AmaxTable:
    """The amaxes and scales of sharded weights, the same on all ranks of a group.

    The table is refreshed in every forward, because PyTorch does not count every write. All ranks
    decide alike when to, from what they run and not from what they hold.
    """

    def __init__(self, weights: Sequence[ShardedParam], *, alone: bool) -> None:
        """Lay out a table for ``weights`` of one group, given in one order on all ranks.

        ``alone``: True if further weights of the same root may be found later.
        """
        self.weights, self.alone, self.reductions = tuple(weights), alone, 0
        shards = [_shard_of(weight) for weight in weights]
        self.slices = [
            ShardSlice(w.shape, w.dim, w.start, shard.recipe.weight_format)
            for w, shard in zip(weights, shards, strict=True)
        ]
        self._forward = -1  # the forward of the last refresh
        self._fresh: set[int] = set()  # weights that were not gathered since
        self._seen: list[int | None] = [None] * len(weights)  # their changes at the last refresh
        # weights of one format lie side by side, so that their scales are computed at once
        starts, size = [0] * len(weights), 0
        self._formats: dict[BlockFormat, slice] = {}
        for index in sorted(range(len(weights)), key=lambda i: self.slices[i].format.name):
            part = self.slices[index]
            starts[index], size = size, size + part.entries
            first = self._formats.get(part.format, slice(starts[index], None)).start
            self._formats[part.format] = slice(first, size)
        self._flat = torch.zeros(size, dtype=torch.float32, device=weights[0].device)
        self._scales = torch.ones_like(self._flat)
        # views are made once: every gather reads some, and a view takes as long as a launch
        amaxes = map(ShardSlice.of, self.slices, repeat(self._flat), starts)
        self._amaxes = list(map(ShardSlice.blocks, self.slices, amaxes, shards))  # of its rows
        self.scales = list(map(ShardSlice.of, self.slices, repeat(self._scales), starts))

    def cast(self, index: int, rows: Tensor) -> Tensor:
        """Cast this rank's rows of a weight by the scales of the whole: e4m3."""
        part = self.slices[index]
        if not rows.numel():
            return torch.empty(rows.shape, dtype=part.format.dtype, device=rows.device)
        return quantize_shard(rows, self._amaxes[index], part.format, *part.offsets)

    def prepare_gather(self, index: int) -> bool:
        """Make the amaxes of a weight those of its rows as they are in this forward.

        A gather for a backward changes nothing: the backward raises if it uses other values than
        its forward did (``saved_weight.py``), and FSDP also gathers ahead what no backward uses.

        Returns:
            Whether the amaxes are those of other rows.
        """
        weight = self.weights[index]
        if weight.in_backward():
            return self._seen[index] != weight.changes()
        forward = weight.forwards()
        if forward != self._forward or index not in self._fresh:
            self.refresh()
            self._forward, self._fresh = forward, set(range(len(self.weights)))
        self._fresh.discard(index)
        return False

    def refresh(self) -> None:
        """Recompute the table with one all-reduce of 4 bytes a block."""
        self._seen = [weight.changes() for weight in self.weights]
        self._flat.zero_()
        targets, sources = [], []
        for index, part in enumerate(self.slices):
            rows = self._rows(index)
            if rows is not None and rows.numel():
                targets.append(self._amaxes[index])
                amax = shard_amax(rows, part.format, *part.offsets)
                sources.append(amax.to(self._flat.device))
        if targets:
            torch._foreach_copy_(targets, sources)
        # as integers, magnitudes keep their order, with NaN above Inf
        dist.all_reduce(self._flat.view(torch.int32), dist.ReduceOp.MAX, self.weights[0].group)
        self.reductions += 1
        for format, where in self._formats.items():
            self._scales[where].copy_(scale_from_amax(self._flat[where], format))

    def _rows(self, index: int) -> Tensor | None:
        """Return the present high-precision rows of a weight; None once they are freed."""
        weight = self.weights[index]
        shard = _shard_of(weight)
        return None if shard is None else shard.master


class Place(NamedTuple):
    """Where a weight is in which table, which was made for a shard with this recipe."""

    table: AmaxTable
    slot: int
    recipe: Recipe


_PLACES: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()
"""The place of each parameter, by FSDP's own object for it.

It outlives the shard: after a move FSDP pads the rows into a new one, on those ranks alone that
have fewer than others. They must not compare their weights while the other ranks do not.
"""


def known_place(owner: Any) -> Place | None:
    """Return the place of FSDP's parameter, if it was made for the recipe that its shard has."""
    place = None if owner is None else _PLACES.get(owner)
    if place is None:
        return None
    weight = place.table.weights[place.slot]
    shard = _shard_of(weight)
    # a backward needs the scales of its forward: it raises if it uses the shard of another recipe
    is_valid = shard is not None and (shard.recipe == place.recipe or weight.in_backward())
    return place if is_valid else None


def place_of(owner: Any) -> Place | None:
    """Return the place of FSDP's parameter; make it now if FSDP knows the weights of one table."""
    place = known_place(owner)
    if place is None or place.table.alone:
        together, are_all = sharded_with(owner)
        if together and (are_all or place is None):
            by_group: dict[str, list[ShardedParam]] = {}
            for weight in together:
                if _shard_of(weight) is not None:
                    by_group.setdefault(weight.group.group_name, []).append(weight)
            for weights in by_group.values():
                _build(weights, alone=not are_all)
            place = known_place(owner)
    return place


def _build(weights: Sequence[ShardedParam], alone: bool) -> None:
    """Make the table of weights that share a group, after a comparison with the other ranks."""
    recipes = [_shard_of(weight).recipe for weight in weights]
    lines = [
        f"{weight.name} {list(weight.shape)} sharded on dim {weight.dim}, "
        f"scale={recipe.weight_format.scale_rounding!r}"
        for weight, recipe in zip(weights, recipes, strict=True)
    ]
    agree("sharded FP8 weights", lines, weights[0].group)
    table = AmaxTable(weights, alone=alone)
    for slot, (weight, recipe) in enumerate(zip(weights, recipes, strict=True)):
        weight.track()
        _PLACES[weight.owner()] = Place(table, slot, recipe)


def _shard_of(weight: ShardedParam) -> Any:
    """Return the present FP8Shard of a weight; None of a parameter that is not in FP8."""
    local = weight.local
    return local if isinstance(local, MasterBase) else None
