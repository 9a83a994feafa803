"""Matching stored tensors with those of a model, by their names, and checking that they fit."""

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
from .contents import Entry, scales_of
from .names import Names, aligned
from .on_disk import SCALE_SUFFIX, CheckpointError


class Source(NamedTuple):
    """The stored tensors that a tensor of the model is read from.

    Attributes:
        names: how the checkpoint names it.
        weights: the tensor itself, or the matrices of a stack, expert after expert.
        scales: those of each of ``weights`` in FP8.
    """

    names: Names
    weights: list[Entry]
    scales: list[Entry]

    @property
    def is_fp8(self) -> bool:
        """Return True if the weights are stored in FP8."""
        return self.weights[0].is_fp8

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
            FP8 weight without scales.
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
        weights = [entries[weight] for weight in way.all]
        for weight, entry in zip(way.all, weights, strict=True):
            if entry.is_fp8 and weight not in scales:
                raise CheckpointError(
                    f"{entry} is FP8 and has no scales, {weight}{SCALE_SUFFIX}: rename those of "
                    f"compressed-tensors, whose names end in '_scale'; where the scales of experts "
                    f"are those of a whole stack [E, N, K], as transformers 5.23 saves them, store "
                    f"the stack instead of its matrices (torch.cat of gate and up, torch.stack)"
                )
        scaled = [entries[scales[weight]] for weight in way.all if weight in scales]
        sources[name] = Source(way, weights, scaled)
        taken |= {*weights}
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
    if first.is_fp8 and not aligned(shape[0], parts):
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
