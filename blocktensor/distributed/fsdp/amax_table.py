"""The block amaxes of all sharded weights of a model, on every rank, by one all-reduce a forward.

A 128x128 block may lie on several ranks. Each rank writes the amax of its share of every block into
a flat table; the maximum over the ranks is the amax of the whole weights. Every rank's cast and the
gathered weight use the scales of this table, which are therefore not gathered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.cast.shard_ops import shard_amax
from ...ops.formats import BlockFormat, ceil_div
from ...ops.reference import scale_from_amax
from ...ops.scale_layouts import pad4
from ...tensor.step_reuse import optimizer_steps
from .kept_cast import KeptCast


@dataclass(frozen=True)
class ShardSlice:
    """The part of a weight that a rank holds, from index ``start`` along ``dim``.

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
        """The entries of a table ``[..., N/128, K/128]`` for the blocks that ``local`` lies in."""
        size = local.shape[self.dim]
        if self._side < -2:
            return table.narrow(self.dim, self.start, size)
        block = self.format.block_shape[self._side]
        first, within = divmod(self.start, block)
        return table.narrow(self.dim, first, ceil_div(within + size, block))


@dataclass(frozen=True)
class ShardedWeight:
    """One sharded weight, with the part of it that this rank holds.

    Attributes:
        local: returns the present high-precision rows, a plain tensor; None once they are freed.
        changes: returns how often the rows have changed in ways that PyTorch counts, alike on all
            ranks.
        forwards: returns how many forwards have begun, alike on all ranks.
        in_backward: returns True while the weight is gathered for a backward.
    """

    name: str
    slice: ShardSlice
    local: Callable[[], Tensor | None]
    changes: Callable[[], int | None]
    forwards: Callable[[], int]
    in_backward: Callable[[], bool]

    def __str__(self) -> str:
        return (
            f"{self.name} {list(self.slice.shape)} sharded on dim {self.slice.dim}, "
            f"scale={self.slice.format.scale_rounding!r}"
        )


class AmaxTable:
    """The amaxes and scales of sharded weights, the same on all ranks of a group.

    The table is refreshed in every forward, because PyTorch does not count every write. All ranks
    decide alike when to, from what they run and not from what they hold.

    With ``reuses`` it is refreshed by a forward only after changes that PyTorch counts and after
    optimizers' steps. Each rank detects changes by itself then: weights must be changed on all
    ranks alike, as optimizers and loads do.
    """

    def __init__(
        self,
        weights: Sequence[ShardedWeight],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        reuses: bool = False,
        alone: bool = False,
    ) -> None:
        """Lay out a table for ``weights``, given in one order on all ranks.

        ``alone``: True if further weights of the same root may be found later.
        """
        self.weights, self.alone = tuple(weights), alone
        self.kept = tuple(KeptCast() for _ in weights)  # with reuses, the cast of each
        self.reductions = 0
        self._group, self._reuses = group, reuses
        self._forward = -1  # the forward of the last refresh
        self._fresh: set[int] = set()  # weights that were not gathered since
        self._is_precomputed = False  # for the next forward
        self._seen: list[int | None] = [None] * len(weights)  # changes before the last refresh
        self._seen_steps: int | None = None
        # weights of one format lie side by side, so that their scales are computed at once
        order = sorted(range(len(weights)), key=lambda i: weights[i].slice.format.name)
        sizes = [_slot_size(weight.slice) for weight in self.weights]
        self._flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self._scales = torch.ones_like(self._flat)
        starts = [0] * len(weights)
        for before, after in itertools.pairwise(order):
            starts[after] = starts[before] + sizes[before]
        self._formats: dict[BlockFormat, slice] = {}
        for index in order:
            format, stop = weights[index].slice.format, starts[index] + sizes[index]
            first = self._formats.get(format, slice(starts[index], None)).start
            self._formats[format] = slice(first, stop)
        # views are made once: every gather reads some, and a view takes as long as a launch
        slices = [weight.slice for weight in self.weights]
        self._amaxes = list(map(_slot, itertools.repeat(self._flat), slices, starts))
        self._weight_scales = list(map(_slot, itertools.repeat(self._scales), slices, starts))
        self._of_rows: dict[tuple[int, torch.Size], Tensor] = {}

    def amax_of_rows(self, index: int, local: Tensor) -> Tensor:
        """The amaxes of the blocks of a weight that ``local``, this rank's rows, lies in."""
        key = index, local.shape
        found = self._of_rows.get(key)
        if found is None:
            part = self.weights[index].slice
            found = self._of_rows[key] = part.blocks(self._amaxes[index], local)
        return found

    def scale(self, index: int) -> Tensor:
        """The scale of each block of a weight, laid out as by a cast."""
        return self._weight_scales[index]

    def reused(self, index: int) -> tuple[Tensor, object] | None:
        """The rows of a weight, and a value that changes when a cast of them may not be reused.

        The rows are those of the parameter: FSDP may gather a copy of it on another device.
        Without ``reuses`` None.
        """
        rows = self.weights[index].local() if self._reuses else None
        if rows is None:
            return None
        return rows, (self.reductions, self.weights[index].changes(), self._steps())

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
        is_new = forward != self._forward or index not in self._fresh
        can_reuse = self._reuses or self._is_precomputed
        if is_new and not (can_reuse and (self._seen, self._seen_steps) == self._now()):
            self.refresh()
        if is_new:
            self._forward, self._fresh = forward, set(range(len(self.weights)))
            self._is_precomputed = False
        self._fresh.discard(index)
        return False

    def precompute(self) -> None:
        """Refresh the table for the next forward."""
        self.refresh()
        self._is_precomputed = True

    def refresh(self) -> None:
        """Recompute the table with one all-reduce of 4 bytes a block."""
        self._seen, self._seen_steps = self._now()
        self._flat.zero_()
        targets, sources = [], []
        for index, weight in enumerate(self.weights):
            local = weight.local()
            if local is not None and local.numel():
                target = self.amax_of_rows(index, local)
                targets.append(target)
                part = weight.slice
                sources.append(shard_amax(local, part.format, *part.offsets).to(target.device))
        if targets:
            torch._foreach_copy_(targets, sources)
        # as integers, magnitudes keep their order, with NaN above Inf
        dist.all_reduce(self._flat.view(torch.int32), dist.ReduceOp.MAX, self._group)
        self.reductions += 1
        for format, where in self._formats.items():
            self._scales[where].copy_(scale_from_amax(self._flat[where], format))

    def _now(self) -> tuple[list[int | None], int | None]:
        return [weight.changes() for weight in self.weights], self._steps()

    def _steps(self) -> int | None:
        return optimizer_steps() if self._reuses else None


def _slot(flat: Tensor, part: ShardSlice, start: int) -> Tensor:
    """The entries of a weight in a flat table, without those that pad its rows."""
    *rows, cols = part.format.scale_shape(part.shape)
    padded = flat[start : start + _slot_size(part)].view((*rows, pad4(cols)))
    return padded[..., :cols]


def _slot_size(part: ShardSlice) -> int:
    *rows, cols = part.format.scale_shape(part.shape)
    return math.prod(rows) * pad4(cols)
