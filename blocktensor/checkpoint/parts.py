"""Describe parts of tensors: where a box of one tensor lies in another, in elements or blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..ops.formats import BLOCK, ceil_div

Box = tuple[slice, ...]
"""A run of indices along each dimension of a tensor."""


class Part(NamedTuple):
    """A box of this tensor that also lies in another one, maybe with permuted dimensions.

    Attributes:
        name: of the other tensor.
        there: its indices in the other tensor.
        here: its indices in this tensor.
        axes: the dimension of the other tensor along each dimension here; None for a dimension of
            size 1 that the other tensor lacks.
    """

    name: str
    there: Box
    here: Box
    axes: tuple[int | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of the box here."""
        return sizes_of(self.here)

    def take(self, other: Tensor) -> Tensor:
        """Return the values of the box, in its shape here."""
        return self.arrange(other[self.there])

    def arrange(self, values: Tensor) -> Tensor:
        """Return the values of the box, in its shape here, from those in its shape there."""
        kept = [axis for axis in self.axes if axis is not None]
        rest = [axis for axis in range(values.ndim) if axis not in kept]
        return values.permute([*kept, *rest]).reshape(self.shape)

    def within(self, box: Box) -> Part | None:
        """Return the part that also lies in a box of this tensor; None if there is none."""
        here = tuple(
            slice(max(mine.start, run.start), min(mine.stop, run.stop))
            for mine, run in zip(self.here, box, strict=True)
        )
        if any(run.start >= run.stop for run in here):
            return None
        there = list(self.there)
        for axis, run, all_mine in zip(self.axes, here, self.here, strict=True):
            if axis is not None:
                moved = self.there[axis].start - all_mine.start
                there[axis] = slice(run.start + moved, run.stop + moved)
        return self._replace(there=tuple(there), here=here)

    def of(self, name: str) -> Part:
        """Return the inverse part: exchange this tensor, named ``name``, and the other one."""
        back = [
            self.axes.index(axis) if axis in self.axes else None for axis in range(len(self.there))
        ]
        return Part(name, self.here, self.there, tuple(back))

    def in_blocks(self, here: Sequence[int]) -> Part | None:
        """Return the part of the other tensor's scales that belongs to the box.

        Args:
            here: the shape of this tensor.

        Returns:
            None if a block of this tensor is not a part of one block of the other tensor.
        """
        for dim, axis in enumerate(self.axes):
            is_cut, was_cut = dim >= len(here) - 2, axis is None or axis >= len(self.there) - 2
            if axis is not None and is_cut != was_cut and self.shape[dim] > 1:
                return None  # blocks have one element along one of them
        ends = zip(self.here[-2:], here[-2:], strict=True)
        if any(run.stop % BLOCK and run.stop != size for run, size in ends):
            return None
        if any(run.start % BLOCK for run in (*self.here[-2:], *self.there[-2:])):
            return None
        return self._replace(there=blocks_of(self.there), here=blocks_of(self.here))


def sizes_of(box: Box) -> tuple[int, ...]:
    """Return the size of a box."""
    return tuple(run.stop - run.start for run in box)


def spelled(box: Box) -> str:
    """Return a box as text, in the syntax of an index."""
    return f"[{', '.join(f'{run.start}:{run.stop}' for run in box)}]"


def all_of(shape: Sequence[int]) -> Box:
    """Return the box that covers a tensor of this shape."""
    return tuple(slice(0, size) for size in shape)


def whole_blocks(blocks: Box, shape: Sequence[int]) -> Box:
    """Return the box of all elements of blocks, in a weight of this shape."""
    *lead, rows, cols = blocks
    ends = zip((rows, cols), shape[-2:], strict=True)
    return (
        *lead,
        *(slice(run.start * BLOCK, min(run.stop * BLOCK, size)) for run, size in ends),
    )


def entire(name: str, shape: Sequence[int]) -> Part:
    """Return the part that covers two equal tensors."""
    return Part(name, all_of(shape), all_of(shape), tuple(range(len(shape))))


def cover(parts: Sequence[Part], shape: Sequence[int]) -> bool:
    """Return whether parts that do not overlap cover a tensor."""
    return sum(math.prod(part.shape) for part in parts) == math.prod(shape)


def blocks_of(box: Box) -> Box:
    """Return the indices of the blocks in which a box of a weight lies."""
    *lead, rows, cols = box
    return (
        *lead,
        *(slice(run.start // BLOCK, ceil_div(run.stop, BLOCK)) for run in (rows, cols)),
    )
