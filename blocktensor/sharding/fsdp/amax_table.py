"""Keep the block amaxes of sharded weights on every rank, by one all-reduce in each forward.

A 128x128 block may lie on several ranks. Each rank writes the amax of its share of every block into
a flat tensor; the maximum over the ranks is the amax of the whole weights. All ranks compute the
same scales from these amaxes, so that scales are not gathered.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.formats import BlockFormat, ceil_div
from ...ops.reference import scale_from_amax
from ...ops.scale_layouts import pad4
from ...recipe import Recipe
from ...tensor.base import MasterBase
from ..part import Part, Region, check_groups, max_over_ranks
from ..ranks import agree
from .fsdp_internals import ShardedParam, by_group, sharded_with


class View(NamedTuple):
    """A view of a flat tensor, which can be taken of others by one op, in a third of the time."""

    shape: torch.Size
    strides: tuple[int, ...]
    first: int

    @classmethod
    def like(cls, view: Tensor) -> View:
        """Return the view by which ``view`` was taken of its base."""
        return cls(view.shape, view.stride(), int(view.storage_offset()))

    def of(self, flat: Tensor) -> Tensor:
        """Take this view of ``flat``."""
        return flat.as_strided(*self)


class Layout:
    """The places of the blocks of weights in a flat tensor.

    Attributes:
        size: the size of the flat tensor.
        formats: for each format the slice of its weights, whose scales are computed at once.
        own: for each weight, the view of the blocks of this rank's rows.
        whole: for each weight, the view of all its blocks.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        """Lay out weights, of which this rank holds ``parts``."""
        starts, self.size = [0] * len(parts), 0
        self.formats: dict[BlockFormat, slice] = {}
        for index in sorted(range(len(parts)), key=lambda i: parts[i].format.name):
            part = parts[index]
            starts[index], self.size = self.size, self.size + math.prod(_padded_shape(part))
            first = self.formats.get(part.format, slice(starts[index], None)).start
            self.formats[part.format] = slice(first, self.size)
        flat = torch.empty(self.size, dtype=torch.float32, device="meta")
        whole = [_entries_of(part, flat[first:]) for part, first in zip(parts, starts, strict=True)]
        own = [x[part.blocks] for part, x in zip(parts, whole, strict=True)]
        self.whole, self.own = [View.like(x) for x in whole], [View.like(x) for x in own]


def _padded_shape(part: Part) -> tuple[int, ...]:
    """Return the shape of a weight's entries in a flat tensor; rows of scales are padded."""
    *rows, cols = part.scale_shape
    return (*rows, pad4(cols))


def _entries_of(part: Part, flat: Tensor) -> Tensor:
    """View the entries of a weight at the beginning of a flat tensor, without the padding."""
    shape = _padded_shape(part)
    return flat[: math.prod(shape)].view(shape)[..., : part.scale_shape[-1]]


class Reduction:
    """The flat tensors of one reduction, which are never written again.

    So a running gather has the scales of its bytes, even after later reductions.
    """

    def __init__(self, *flat: Tensor) -> None:
        self._flat = flat
        self._streams: set[Any] = set()

    def used_here(self) -> None:
        """Keep the memory until the work queued on the current stream is done."""
        if not self._flat[0].is_cuda:
            return
        stream = torch.cuda.current_stream(self._flat[0].device)
        if stream not in self._streams:
            self._streams.add(stream)
            for flat in self._flat:
                flat.record_stream(stream)


class Reduced(NamedTuple):
    """The amaxes and scales of one weight, after a reduction.

    Attributes:
        own: the amaxes of this rank's rows in their blocks.
        amax: the amaxes of these whole blocks.
        scale: the scales of all blocks.
        changes: the count of changes to its rows when they were read; None if all values are NaN.
        reduction: the flat tensors.
    """

    own: Tensor
    amax: Tensor
    scale: Tensor
    changes: int | None
    reduction: Reduction


class AmaxTable:
    """The latest :class:`Reduced` of all weights that one group of ranks shards under one root.

    It alone decides when amaxes are reduced, and whether the amaxes of a weight are up to date. All
    ranks must reduce together. So they decide by what they run, which is the same on all ranks, and
    not by what they hold: rows may be written on one rank alone, and PyTorch does not count every
    write.
    """

    def __init__(
        self, weights: Sequence[ShardedParam], known: Sequence[Reduced | None], *, alone: bool
    ) -> None:
        """Create a table for ``weights``, in the same order on all ranks.

        Args:
            weights: the weights of one group of ranks.
            known: the :class:`Reduced` of each in an earlier table.
            alone: True if further weights of the same root may be found later.
        """
        self.weights, self.alone, self.reductions = tuple(weights), alone, 0
        shards = [_shard_of(weight) for weight in weights]
        self.parts = [
            Part(
                w.shape,
                Region.along(w.dim, w.start, shard.shape[w.dim], w.shape),
                shard.recipe.weight_format,
            )
            for w, shard in zip(weights, shards, strict=True)
        ]
        self._reduced = list(known)
        self._all = tuple(range(len(weights)))
        together: dict[int, list[int]] = {}
        for index, weight in enumerate(weights):
            together.setdefault(weight.gathered_with, []).append(index)
        self._together = {i: tuple(some) for some in together.values() for i in some}
        self._layouts = {
            some: Layout([self.parts[i] for i in some])
            for some in {self._all, *self._together.values()}
        }
        self._forward = -1  # the forward in which all weights were last reduced
        self._gathered: set[int] = set()  # weights gathered since then
        self._prepared: set[int] = set()  # weights of the running gather, not yet asked for
        self._written: set[int] = set()  # weights that forwards write to before they gather them

    def prepare_gather(self, index: int) -> Reduced:
        """Return the amaxes and scales for the next gather of a weight.

        FSDP asks for all weights of its group, one after another; the first request decides for
        all. FSDP gathers

        - for a forward: the first gather of a forward reduces the amaxes of all weights; so does a
          gather of weights that this forward has gathered before;
        - because somebody calls ``unshard()``: the amaxes of its weights are reduced, since nobody
          knows who has written to them;
        - for a backward: nothing is reduced. The backward raises if it uses other values than its
          forward, and FSDP also prefetches weights that no backward uses. Rows that have changed
          since their reduction become NaN, so that no rank computes with saturated values.
        """
        if self.weights[index].in_backward():
            return self._in_backward(index)
        if index not in self._prepared:
            self._prepare(self._together[index])
        self._prepared.discard(index)
        reduced = self._reduced[index]
        assert reduced is not None
        return reduced

    def cast(self, index: int, rows: Tensor, reduced: Reduced) -> Tensor:
        """Cast this rank's rows of a weight to e4m3 by the scales of the whole weight.

        Blocks become NaN if their amax has changed since the reduction: so all ranks see changes
        that PyTorch does not count.
        """
        part = self.parts[index]
        if not rows.numel():
            return torch.empty(rows.shape, dtype=part.format.dtype, device=rows.device)
        reduced.reduction.used_here()
        return part.cast(rows, reduced.amax, reduced.own)

    def known(self, index: int) -> Reduced | None:
        """Return the latest :class:`Reduced` of a weight; None if its amaxes were never reduced."""
        return self._reduced[index]

    def _in_backward(self, index: int) -> Reduced:
        """Return the reduction of the present rows, or NaN if they have changed since."""
        reduced = self._reduced[index]
        if reduced is not None and self._is_of_present_rows(index):
            return reduced
        layout = self._layouts[self._all]
        nan = torch.full((layout.size,), math.nan, device=self.weights[index].device)
        views = (layout.own[index].of(nan),) * 2, layout.whole[index].of(nan)
        return Reduced(*views[0], views[1], None, Reduction(nan))

    def _prepare(self, together: tuple[int, ...]) -> None:
        """Reduce the amaxes that a gather of these weights needs."""
        self._prepared.clear()
        first = self.weights[together[0]]
        forward = first.forwards()
        if not first.in_forward():
            self._reduce(together)
        elif forward != self._forward or not self._gathered.isdisjoint(together):
            self._reduce(self._all)
            self._forward = forward
            self._gathered.clear()
        elif self._are_written_in_forwards(together):
            self._reduce(together)
        self._gathered.update(together)
        self._prepared.update(together)

    def _are_written_in_forwards(self, together: tuple[int, ...]) -> bool:
        """Return True if forwards write to weights before they gather them.

        A rank detects this by its own counters, which may differ between ranks: so the ranks agree
        on it, once for each weight.
        """
        stale = {i for i in together if not self._is_of_present_rows(i)} - self._written
        if stale:
            first = self.weights[together[0]]
            if first.ranks > 1:
                agree(
                    "FP8 weights that a forward writes to before it gathers them",
                    [self.weights[i].name for i in sorted(stale)],
                    first.group,
                    "write to the shards on all ranks, or before the forward",
                )
            self._written |= stale
        return not self._written.isdisjoint(together)

    def _is_of_present_rows(self, index: int) -> bool:
        """Return True if a weight has no counted change since its reduction."""
        reduced = self._reduced[index]
        return reduced is not None and reduced.changes == self.weights[index].changes()

    def _reduce(self, some: tuple[int, ...]) -> None:
        """Reduce the amaxes of weights, with one all-reduce of 4 bytes a block."""
        weights, layout = [self.weights[i] for i in some], self._layouts[some]
        changes = [weight.changes() for weight in weights]
        first = weights[0]
        mine = torch.zeros(layout.size, dtype=torch.float32, device=first.device)
        own = [view.of(mine) for view in layout.own]
        targets, sources = [], []
        for index, weight, target in zip(some, weights, own, strict=True):
            shard = _shard_of(weight)
            if shard is not None and shard.master.numel():
                targets.append(target)
                sources.append(self.parts[index].amax(shard.master).to(mine.device))
        if targets:
            torch._foreach_copy_(targets, sources)
        flat = mine
        if first.ranks > 1:
            flat = max_over_ranks(mine.clone(), first.group)
        self.reductions += 1
        scales = torch.empty_like(flat)
        for format, where in layout.formats.items():
            scales[where].copy_(scale_from_amax(flat[where], format))
        reduction = Reduction(mine, flat, scales)
        for i, part_of_mine, count, here, whole in zip(
            some, own, changes, layout.own, layout.whole, strict=True
        ):
            views = part_of_mine, here.of(flat), whole.of(scales)
            self._reduced[i] = Reduced(*views, count, reduction)


class Place(NamedTuple):
    """The place of a weight in a table that was made for a shard with this recipe."""

    table: AmaxTable
    slot: int
    recipe: Recipe


_PLACES: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()
"""The place of each parameter, by FSDP's own object for it.

It outlives the shard: after a move FSDP creates a new shard with padded rows, but only on ranks
with fewer rows. These ranks must not compare their weights alone.
"""


def known_place(owner: Any) -> Place | None:
    """Return the place of FSDP's parameter, if it was made for the recipe of its shard."""
    place = None if owner is None else _PLACES.get(owner)
    if place is None:
        return None
    weight = place.table.weights[place.slot]
    shard = _shard_of(weight)
    # a backward needs the scales of its forward: it raises if it uses the shard of another recipe
    is_valid = shard is not None and (shard.recipe == place.recipe or weight.in_backward())
    return place if is_valid else None


def place_of(owner: Any) -> Place | None:
    """Return the place of FSDP's parameter; create it if FSDP knows the weights of one table."""
    place = known_place(owner)
    if place is None or place.table.alone:
        together, are_all = sharded_with(owner)
        if together and (are_all or place is None):
            for weights in by_group(x for x in together if _shard_of(x) is not None):
                _build(weights, alone=not are_all)
            place = known_place(owner)
    return place


def _build(weights: Sequence[ShardedParam], alone: bool) -> None:
    """Create the table of weights that share a group, after a comparison with the other ranks."""
    recipes = [_shard_of(weight).recipe for weight in weights]
    for weight, recipe in zip(weights, recipes, strict=True):
        each = ceil_div(weight.shape[weight.dim], weight.ranks)
        check_groups(weight.shape, weight.dim, each, recipe.weight_format)
    lines = [f"{weight}, {recipe}" for weight, recipe in zip(weights, recipes, strict=True)]
    agree("sharded FP8 weights", lines, weights[0].group)
    places = [_PLACES.get(weight.owner()) for weight in weights]
    known = [
        None if place is None or place.recipe != recipe else place.table.known(place.slot)
        for place, recipe in zip(places, recipes, strict=True)
    ]
    table = AmaxTable(weights, known, alone=alone)
    for slot, (weight, recipe) in enumerate(zip(weights, recipes, strict=True)):
        weight.track()
        _PLACES[weight.owner()] = Place(table, slot, recipe)


def _shard_of(weight: ShardedParam) -> Any:
    """Return the present FP8Shard of a weight; None for a parameter that is not in FP8."""
    local = weight.local
    return local if isinstance(local, MasterBase) else None
