"""Matching stored tensors with those of a model, by their names, and checking that they fit.

The scales of an FP8 tensor lie beside it. Those of a stack of experts may lie beside the stack
while its matrices are stored one by one. So transformers 5.23 saves what it has quantized itself:
``experts.3.gate_proj.weight`` and its like are e4m3 without scales of their own, and
``experts.gate_up_proj_scale_inv`` has a scale for each 128x128 block of ``[E, 2N, K]``. A block may
have rows of gate and of up.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from ..ops import checks
from ..ops.formats import BLOCKS_128X128
from ..sharding.dtensor import fp8_part
from ..sharding.fsdp.shards import FrozenShard
from ..tensor.base import MasterBase
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from .contents import Entry, check_scales, scales_of
from .names import Names, aligned, transformers_stacks
from .on_disk import SCALE_SUFFIX, CheckpointError


class StackScales(NamedTuple):
    """The stored scales of a stack, or of a larger stack of which the model's is a part.

    Attributes:
        entry: the stored tensor.
        part: which of the ``parts`` equal parts of its rows belong to the model's stack: those of
            gate where it has those of gate and up.
    """

    entry: Entry
    part: int
    parts: int

    def scaled(self, stack: Sequence[int]) -> tuple[int, int, int]:
        """Return the shape of all that it scales; ``stack``: the part of it in the model."""
        experts, rows, cols = stack
        return experts, rows * self.parts, cols

    def rows(self, scales: Tensor) -> Tensor:
        """Return the rows of the whole tensor that belong to the model's stack."""
        return scales.chunk(self.parts, 1)[self.part]


class Source(NamedTuple):
    """The stored tensors that a tensor of the model is read from.

    Attributes:
        names: how the checkpoint names it.
        weights: the tensor itself, or the matrices of a stack, expert after expert.
        scales: those of each of ``weights`` in FP8, unless ``stack_scales`` has all.
    """

    names: Names
    weights: list[Entry]
    scales: list[Entry]
    stack_scales: StackScales | None

    @property
    def is_fp8(self) -> bool:
        """Return True if the weights are stored in FP8."""
        return self.weights[0].is_fp8

    @property
    def entries(self) -> list[Entry]:
        """All stored tensors."""
        stack = [] if self.stack_scales is None else [self.stack_scales.entry]
        return [*self.weights, *self.scales, *stack]

    def boxes(self, shape: Sequence[int]) -> list[tuple[slice, ...]]:
        """Return where each of ``weights`` is in a plain tensor of ``shape``, or in its scales."""
        if self.names.experts is None:
            return [tuple(slice(0, size) for size in shape)]
        experts, rows, cols = shape
        each = rows // len(self.names.templates)
        return [
            (slice(expert, expert + 1), slice(first, first + each), slice(0, cols))
            for expert in range(experts)
            for first in range(0, rows, each)
        ]


def match(
    folder: Path, known: Mapping[str, Sequence[Names]], entries: Mapping[str, Entry]
) -> tuple[dict[str, Source], list[str]]:
    """Find the sources of the tensors of a model, and the stored names that belong to none.

    Args:
        folder: the checkpoint, for messages.
        known: the names that each tensor of the model may have, by its own.
        entries: what the checkpoint holds.

    Raises:
        CheckpointError: a stack of which some experts are stored and others are not, or more; an
            FP8 weight without scales, or with its own beside those of its stack.
    """
    scales = scales_of(entries)
    own = set(scales.values())
    left = {name: entry for name, entry in entries.items() if name not in own}
    found: dict[str, Names] = {}
    for name, ways in known.items():
        way = next((way for way in ways if _are_stored(folder, name, way, left)), None)
        if way is not None:
            found[name] = way
    sources: dict[str, Source] = {}
    taken: set[Entry] = set()
    for name, way in found.items():
        stack = _stack_scales(name, way, known[name], entries, scales)
        weights = [entries[weight] for weight in way.all]
        scaled = [entries[scales[weight]] for weight in way.all if weight in scales]
        sources[name] = Source(way, weights, scaled, stack)
        taken |= {*weights, *([stack.entry] if stack else [])}
    return sources, [name for name, entry in left.items() if entry not in taken]


def _are_stored(folder: Path, name: str, way: Names, stored: Container[str]) -> bool:
    """Return whether a tensor is stored so; raise if a stack has more or fewer experts."""
    missing = [weight for weight in way.all if weight not in stored]
    if len(missing) == len(way.all) or way.experts is None:
        return not missing
    extra = [weight for weight in way.of_expert(way.experts) if weight in stored]
    if missing or extra:
        problem = f"of their {len(way.all)} matrices {len(missing)} are missing"
        raise CheckpointError(
            f"{folder}: the model's {name!r} is a stack of {way.experts} experts: "
            f"{problem if missing else 'the checkpoint has more'} ({some(missing or extra)})"
        )
    return True


def _stack_scales(
    name: str,
    way: Names,
    ways: Sequence[Names],
    entries: Mapping[str, Entry],
    scales: Mapping[str, str],
) -> StackScales | None:
    """Find the scales of an FP8 stack whose matrices have none of their own."""
    weights = [weight for weight in way.all if entries[weight].is_fp8]
    bare = [weight for weight in weights if weight not in scales]
    places = _places_of_scales(way, ways) if weights else {}
    there = [scale for scale in places if scale in entries]
    if bare and len(there) != 1:
        raise CheckpointError(
            f"{entries[bare[0]]} is FP8 and has {len(there)} scales: "
            f"expected one of {' or '.join([bare[0] + SCALE_SUFFIX, *places])}; rename those of "
            f"compressed-tensors, whose names end in '_scale'"
        )
    if there and len(bare) < len(weights):
        weight = next(weight for weight in weights if weight in scales)
        raise CheckpointError(
            f"{entries[weight]} is FP8 and has 2 scales: expected "
            f"either {scales[weight]}, and so for each matrix of {name!r}, or {there[0]}"
        )
    return StackScales(entries[there[0]], *places[there[0]]) if there else None


def _places_of_scales(way: Names, ways: Sequence[Names]) -> dict[str, tuple[int, int]]:
    """Return the names that the scales of a stack stored in matrices may have.

    Each with the part of its rows that belongs to the stack, and the number of parts.
    """
    if way.experts is None:
        return {}
    stacks = [(whole.templates[0], 0, 1) for whole in ways if whole.experts is None]
    return {
        stack + SCALE_SUFFIX: (part, parts)
        for stack, part, parts in (*stacks, *transformers_stacks(way))
    }


def some(names: Sequence[str]) -> str:
    """Return the first five names, for a message."""
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def check_fits(name: str, source: Source, current: Tensor) -> None:
    """Raise CheckpointError if what is stored does not fit its place in the model."""
    names, first = source.names, source.weights[0]
    shape, of, parts = tuple(current.shape), "", len(names.templates)
    if names.experts is not None:
        shape = (shape[1] // parts, shape[2])
        of = f" for an expert of {name!r} {list(current.shape)}"
    for entry in source.weights:
        if entry.shape != shape:
            raise CheckpointError(
                f"{entry} has shape {list(entry.shape)}, the model's has {list(shape)}{of}"
            )
        if entry.is_fp8 != first.is_fp8:
            raise CheckpointError(
                f"{entry} is {entry.dtype}, {first.name!r} of the same stack is {first.dtype}: "
                f"expected all in FP8 or none"
            )
        _check_dtype(entry, current)
    scales = source.stack_scales
    if scales is not None:
        scaled = scales.scaled(current.shape)
        check_scales(scales.entry, scaled)
        if not aligned(current.shape[1], scales.parts):
            raise CheckpointError(
                f"{scales.entry} has the scales of {list(scaled)}, in which {first.name!r} shares "
                f"blocks with another matrix: the model's {name!r} cannot have them; load into a "
                f"model that holds both in one stack"
            )
    elif first.is_fp8 and not aligned(shape[0], parts):
        raise CheckpointError(
            f"{first} has {shape[0]} rows, no multiple of {BLOCKS_128X128.rows}: its blocks are "
            f"not those of the model's {name!r}, in which the rows of {parts} such matrices follow "
            f"each other; dequantize them with the library that wrote them, then convert"
        )


_PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
"""Stored dtypes of tensors without scales."""


def _check_dtype(entry: Entry, current: Tensor) -> None:
    """Raise CheckpointError if the dtype of a stored tensor does not fit the model's."""
    problem = None
    fp8 = fp8_part(current)
    if entry.is_fp8:
        if isinstance(fp8, MasterBase) and not current.is_meta:
            problem = (
                "is stored in FP8, the model's is trainable and would lose its high-precision "
                "values: load into a model that is not converted yet"
            )
        elif not isinstance(current, nn.Parameter) or current.dtype not in checks.HIGH_PRECISION:
            problem = (
                f"is an FP8 weight, the model's is a buffer or {current.dtype}: expected a "
                f"parameter in one of {checks.HIGH_PRECISION}"
            )
    elif entry.dtype not in _PLAIN:
        problem = f"has dtype {entry.dtype}"
    elif isinstance(fp8, (BlockwiseFP8Tensor, FrozenShard)):
        problem = (
            f"is stored in {entry.dtype}, the model's is frozen in FP8: load into an unconverted "
            f"model, then convert it"
        )
    elif ("F" in entry.dtype) != current.is_floating_point():
        problem = f"is {entry.dtype}, the model's is {current.dtype}"
    if problem is not None:
        raise CheckpointError(f"{entry} {problem}")
