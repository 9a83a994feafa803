"""The block amaxes of all sharded weights of a model, on every rank, by one all-reduce a step.

A 128x128 block may lie on several ranks. Each writes the amax of what it has of every block into
one flat table, and the maximum over the ranks is that of the whole weights. The table's scales are
then the scales of every rank's cast, and of the gathered weight: they need no gather themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.layouts import BLOCK, num_blocks, pad4
from ..ops.part import part_amax
from ..ops.reference import scale_from_amax
from ..recipe import Recipe


@dataclass(frozen=True)
class Part:
    """What a rank holds of a weight of ``shape`` ``[..., N, K]``: where it begins along ``dim``."""

    shape: tuple[int, ...]
    dim: int
    start: int

    @property
    def offsets(self) -> tuple[int, int]:
        """How many rows and columns into its first block it begins."""
        within = self.start % BLOCK
        side = self.dim - len(self.shape)
        return within * (side == -2), within * (side == -1)

    def blocks(self, table: Tensor, local: Tensor) -> Tensor:
        """The entries of a table ``[..., N/128, K/128]`` for the blocks that ``local`` lies in."""
        if self.dim < len(self.shape) - 2:  # whole matrices of a stack
            return table.narrow(self.dim, self.start, local.shape[self.dim])
        first = self.start // BLOCK
        count = num_blocks(self.start % BLOCK + local.shape[self.dim])
        return table.narrow(self.dim, first, count)


@dataclass(frozen=True)
class Member:
    """One sharded weight.

    Attributes:
        name: in the model.
        part: what this rank holds.
        recipe: of its casts.
        local: gives the plain high-precision rows as they are now; None once it is gone.
        version: differs once they have changed.
        everywhere: no rank holds nothing of it.
    """

    name: str
    part: Part
    recipe: Recipe
    local: Callable[[], Tensor | None]
    version: Callable[[], object]
    everywhere: bool

    def __str__(self) -> str:
        return (
            f"{self.name} {list(self.part.shape)} sharded on dim {self.part.dim}, "
            f"scale={self.recipe.scale!r}"
        )


class AmaxTable:
    """The amaxes and scales of sharded weights, the same on all ranks of a group.

    Refreshed whole, when a weight is asked for that has changed since. Whether one has is this
    rank's own observation: weights must be changed on all ranks alike, as optimizers and loads do.
    Who holds nothing of a weight would see no change where rows are written one by one, as
    ``torch.distributed.checkpoint`` does, while others would: the table of such a weight is
    refreshed whenever it is asked for.
    """

    def __init__(
        self,
        members: Sequence[Member],
        group: dist.ProcessGroup,
        device: torch.device,
        alone: bool = False,
    ) -> None:
        """Lay out a table for ``members``, given in one order on all ranks.

        ``alone``: whether there may be more that belong to them.
        """
        self.members, self.alone = tuple(members), alone
        self.reductions = 0
        self._group = group
        self._observed = all(member.everywhere for member in self.members)
        self._seen: list[object] = [None] * len(members)
        # those with powers of two behind the others, so that each kind is rounded at once
        order = sorted(range(len(members)), key=lambda i: members[i].recipe.power_of_two)
        sizes = [_slot_size(member.part.shape) for member in self.members]
        self._flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self._scales = torch.ones_like(self._flat)
        self._fp32 = sum(sizes[i] for i in order if not members[i].recipe.power_of_two)
        self._starts = [0] * len(members)
        for before, after in itertools.pairwise(order):
            self._starts[after] = self._starts[before] + sizes[before]

    def amax(self, index: int) -> Tensor:
        """Of each block of a member: ``[..., N/128, K/128]``."""
        return self._slot(self._flat, index)

    def scale(self, index: int) -> Tensor:
        """Of each block of a member, laid out as a cast's."""
        return self._slot(self._scales, index)

    def ensure(self, index: int) -> None:
        """Make the entries of a member those of its present values."""
        if not self._observed or self._seen[index] != self.members[index].version():
            self.refresh()

    def refresh_if_changed(self) -> None:
        """Fill the table anew if any weight has changed, as far as all ranks can tell."""
        if self._observed and self._seen != self._versions():
            self.refresh()

    def refresh(self) -> None:
        """Fill the table anew: the one collective, an all-reduce of 4 bytes a block."""
        targets, sources = [], []
        versions = self._versions()
        # what a graph saved stays valid if nothing has changed: .data counts no writes
        scales = self._scales.data if self._seen == versions else self._scales
        self._seen = versions
        self._flat.zero_()
        for index, member in enumerate(self.members):
            local = member.local()
            if local is not None and local.numel():
                target = member.part.blocks(self.amax(index), local)
                targets.append(target)
                sources.append(part_amax(local, *member.part.offsets).to(target.device))
        if targets:
            torch._foreach_copy_(targets, sources)
        # as integers, magnitudes are ordered as the numbers are, with NaN above Inf
        dist.all_reduce(self._flat.view(torch.int32), dist.ReduceOp.MAX, self._group)
        self.reductions += 1
        for power_of_two, where in ((False, slice(self._fp32)), (True, slice(self._fp32, None))):
            scales[where].copy_(scale_from_amax(self._flat[where], power_of_two))

    def _versions(self) -> list[object]:
        return [member.version() for member in self.members]

    def _slot(self, flat: Tensor, index: int) -> Tensor:
        *lead, rows, cols = self.members[index].part.shape
        shape = (*lead, num_blocks(rows), pad4(num_blocks(cols)))
        start = self._starts[index]
        padded = flat[start : start + _slot_size((*lead, rows, cols))].view(shape)
        return padded[..., : num_blocks(cols)]


def _slot_size(shape: Sequence[int]) -> int:
    *lead, rows, cols = shape
    return int(torch.Size(lead).numel()) * num_blocks(rows) * pad4(num_blocks(cols))
