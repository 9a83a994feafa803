"""Scales that are stored for a whole stack of experts, beside matrices of single experts.

So transformers 5.23 saves what it has quantized itself: ``experts.3.gate_proj.weight`` and its like
are e4m3 without scales of their own, and ``experts.gate_up_proj_scale_inv`` has the scales of all
experts, a scale for each 128x128 block of ``[E, 2N, K]``. A block may have rows of gate and of up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from .contents import Entry, check_scales
from .match import names_of
from .names import Spelling, aligned, transformers_stacks
from .on_disk import SCALE_SUFFIXES, CheckpointError
from .pretrained_names import Pieces


class StackScales(NamedTuple):
    """The tensor that has the scales of a stack.

    Attributes:
        name: of the tensor.
        part: which of the ``parts`` equal parts of its rows are those of the model's stack: that
            of gate where it has those of gate and up.
    """

    name: str
    part: int
    parts: int

    def scaled(self, stack: Sequence[int]) -> tuple[int, int, int]:
        """The shape of all that the tensor scales; ``stack``: the part of it in the model."""
        experts, rows, cols = stack
        return experts, rows * self.parts, cols

    def rows(self, scales: Tensor) -> Tensor:
        """Of the whole tensor what belongs to the model's stack."""
        return scales.chunk(self.parts, 1)[self.part]


def scales_of_stacks(
    found: Mapping[str, Spelling],
    known: Mapping[str, Sequence[Spelling]],
    entries: Mapping[str, Entry],
    scales: Mapping[str, str],
) -> dict[str, StackScales]:
    """Where the scales are of stacks in FP8 whose matrices have none, by names in the model.

    Args:
        found: how each tensor of the model is named in the checkpoint.
        known: all names that each may have.
        entries: what the checkpoint holds.
        scales: the scales of each FP8 weight that has its own.

    Raises:
        CheckpointError: an FP8 weight without scales, or with its own beside those of its stack.
    """
    made = {}
    for name, way in found.items():
        weights = [weight for weight in names_of(way) if entries[weight].is_fp8]
        bare = [weight for weight in weights if weight not in scales]
        expected = list(_names(way, known[name])) if weights else []
        there = [one for one in expected if one.name in entries]
        if bare and len(there) != 1:
            own = [bare[0] + suffix for suffix in SCALE_SUFFIXES.values()]
            raise CheckpointError(
                f"{entries[bare[0]].file}: tensor {bare[0]!r} is FP8 and has {len(there)} scales: "
                f"expected one of {' or '.join([*own, *(one.name for one in expected)])}"
            )
        if there and len(bare) < len(weights):
            weight = next(weight for weight in weights if weight in scales)
            raise CheckpointError(
                f"{entries[weight].file}: tensor {weight!r} is FP8 and has 2 scales: expected "
                f"either {scales[weight]}, and so for each matrix of {name!r}, or {there[0].name}"
            )
        if there:
            made[name] = there[0]
    return made


def check_stack_scales(
    name: str,
    stack: Sequence[int],
    matrix: str,
    scales: StackScales,
    entries: Mapping[str, Entry],
) -> None:
    """Raise CheckpointError if the scales of a stack do not fit its place in the model.

    Args:
        name: of the stack in the model.
        stack: its shape ``[E, N, K]``.
        matrix: the name of one of its matrices in the checkpoint.
        scales: where its scales are.
        entries: what the checkpoint holds.
    """
    whole = scales.scaled(stack)
    check_scales(scales.name, entries[scales.name], whole)
    if not aligned(stack[1], scales.parts):
        raise CheckpointError(
            f"{entries[scales.name].file}: tensor {scales.name!r} has the scales of "
            f"{list(whole)}, in which {matrix!r} shares blocks with another matrix: the model's "
            f"{name!r} cannot have them; load into a model that holds both in one stack"
        )


def _names(way: Spelling, ways: Sequence[Spelling]) -> Iterator[StackScales]:
    """Where the scales of a stack that is stored in matrices may be, by its names and by theirs."""
    if not isinstance(way, Pieces):
        return
    stacks = [(whole, 0, 1) for whole in ways if isinstance(whole, str)]
    for stack, part, parts in dict.fromkeys([*stacks, *transformers_stacks(way)]):
        for suffix in SCALE_SUFFIXES.values():
            yield StackScales(stack + suffix, part, parts)
