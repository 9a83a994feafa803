"""Match stored tensors with the tensors of a model by their names, and check that they fit."""

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
from .contents import Entry, names_of_scales, scales_of
from .names import Names, possible_names
from .on_disk import CheckpointError
from .parts import Part, entire, sizes_of, spelled
from .pretrained import pretrained_models
from .pretrained_reader import PretrainedReader


class Source(NamedTuple):
    """The stored tensors from which one tensor of the model is read.

    Attributes:
        parts: the parts of the tensor, named as in :attr:`weights`.
        weights: the stored tensor of each part.
        scales: the scales of each tensor in ``weights`` that is in FP8.
        whole: True if each tensor in ``weights`` must be exactly one part.
    """

    parts: Sequence[Part]
    weights: Sequence[Entry]
    scales: Sequence[Entry] = ()
    whole: bool = True

    @property
    def is_fp8(self) -> bool:
        """Return True if the weights are stored in FP8."""
        return self.weights[0].is_fp8

    @property
    def scaled(self) -> list[tuple[Entry, Entry]]:
        """The scales of each tensor in :attr:`weights` that is in FP8, each with that tensor."""
        return [*zip(self.scales, self.weights, strict=True)] if self.scales else []

    def blocks(self, shape: Sequence[int]) -> list[Part]:
        """Return the parts of the scales of a tensor of ``shape``."""
        return [block for part in self.parts if (block := part.in_blocks(shape)) is not None]


class Matched(NamedTuple):
    """The stored tensors that belong to a model.

    Attributes:
        sources: the sources of the model's tensors, by name.
        unexpected: the names of stored tensors that belong to none.
        readers: the readers of transformers' models, which compute some tensors.
    """

    sources: dict[str, Source]
    unexpected: list[str]
    readers: list[PretrainedReader]


def match(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    folder: Path,
    entries: Mapping[str, Entry],
    readers: list[PretrainedReader] | None = None,
) -> Matched:
    """Find the sources of the tensors of a model, and the stored names that belong to none.

    A tensor of a transformers model gets what transformers would load into it. Otherwise, and for
    all other models, its name decides.

    Args:
        model: any module.
        tensors: the tensors of the model by their names in ``state_dict``.
        folder: the checkpoint, for messages.
        entries: what the checkpoint holds.
        readers: the readers of the transformers models in it; default: readers with the models' own
            rules.

    Raises:
        CheckpointError: a stack with missing or surplus experts; an FP8 weight without scales, or
            one that transformers does not compute by joining and splitting alone.
    """
    scales = scales_of(entries)
    own = set(scales.values())
    left = {name: entry for name, entry in entries.items() if name not in own}
    if readers is None:
        inner = pretrained_models(model)
        readers = [PretrainedReader(prefix, each, left) for prefix, each in inner]
    sources: dict[str, Source] = {}
    taken: set[str] = set()
    names = possible_names(model)

    def source(parts: Sequence[Part], whole: bool) -> Source:
        taken.update(part.name for part in parts)
        for part in parts:
            if left[part.name].is_fp8 and part.name not in scales:
                raise _without_scales(left[part.name])
        scaled = [entries[scales[part.name]] for part in parts if part.name in scales]
        return Source(parts, [left[part.name] for part in parts], scaled, whole)

    for name, x in tensors.items():
        computes = next((reader for reader in readers if name in reader.computed), None)
        parts = next((reader.parts[name] for reader in readers if name in reader.parts), None)
        if computes is not None:
            taken |= computes.computed[name]
            sources[name] = _computed(folder, name, x, computes, left)
        elif parts is not None:
            sources[name] = source(parts, whole=False)
        elif way := next((y for y in names[name] if _are_stored(folder, name, y, left)), None):
            for reader in readers:  # a tensor with the right name needs no conversion
                _check_readable(folder, name, reader.failed)
            sources[name] = source(way.parts(x.shape), whole=True)
        else:
            for reader in readers:
                _check_readable(folder, name, reader.failed | reader.mismatched)
    return Matched(sources, [name for name in left if name not in taken], readers)


def _computed(
    folder: Path, name: str, x: Tensor, reader: PretrainedReader, entries: Mapping[str, Entry]
) -> Source:
    """Return the source of a tensor that transformers computes."""
    stored = [entries[each] for each in sorted(reader.computed[name])]
    for entry in stored:
        if entry.is_fp8:
            raise CheckpointError(
                f"{entry} is in FP8, and transformers would compute {name!r} from it otherwise "
                f"than by joining and splitting: dequantize it with the library that wrote it, "
                f"then convert"
            )
    made = Entry(folder, stored[0].dtype, tuple(x.shape), name)
    return Source([entire(name, x.shape)], [made], whole=False)


def _check_readable(folder: Path, name: str, problems: Mapping[str, str]) -> None:
    """Raise CheckpointError if a tensor of the model cannot be computed from stored ones."""
    if name in problems:
        raise CheckpointError(
            f"{folder}: {name!r} cannot be loaded from the tensors that transformers would load "
            f"into it: {problems[name]}"
        )


def _without_scales(entry: Entry) -> CheckpointError:
    names = ", ".join(name.rpartition(".")[2] for name in names_of_scales(entry.name))
    return CheckpointError(
        f"{entry} is FP8 and has no scales: expected one of {names} in its module; where the "
        f"file has the scales of a whole stack of experts [E, N, K], as transformers 5.23 saves "
        f"them, store the stack instead of its matrices (torch.cat of gate and up, torch.stack)"
    )


def _are_stored(folder: Path, name: str, way: Names, stored: Container[str]) -> bool:
    """Return whether a tensor is stored under these names; raise if a stack has other experts."""
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


def check_fits(name: str, source: Source, current: Tensor, *, is_frozen: bool) -> None:
    """Raise CheckpointError if what is stored does not fit its place in the model.

    ``is_frozen``: whether it becomes a frozen FP8 weight.
    """
    first, is_stack = source.weights[0], len(source.parts) > 1 and current.ndim == 3
    of = f" for an expert of {name!r} {list(current.shape)}" if is_stack else ""
    for part, entry in zip(source.parts, source.weights, strict=True):
        expected = sizes_of(part.there)
        if source.whole and entry.shape != expected:
            raise CheckpointError(
                f"{entry} has shape {list(entry.shape)}, the model's has {list(expected)}{of}"
            )
        if entry.is_fp8 != first.is_fp8:
            what = "stack" if is_stack else "tensor"
            raise CheckpointError(
                f"{entry} is {entry.dtype}, {first.name!r} of the same {what} is {first.dtype}: "
                f"expected all in FP8 or none"
            )
        _check_dtype(entry, current, is_frozen)
        if is_frozen and part.in_blocks(current.shape) is None:
            raise CheckpointError(
                f"{entry} {list(entry.shape)} is in FP8, and its {BLOCKS_128X128.rows}x"
                f"{BLOCKS_128X128.cols} blocks are not the blocks of the model's {name!r} "
                f"{list(current.shape)}, of which it is {spelled(part.here)}: dequantize it with "
                f"the library that wrote it, then convert"
            )


_PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
"""Dtypes in which tensors without scales may be stored."""


def _check_dtype(entry: Entry, current: Tensor, is_frozen: bool) -> None:
    """Raise CheckpointError if the dtype of a stored tensor does not fit the model's."""
    problem = None
    fp8 = fp8_part(current)
    if entry.is_fp8:
        if is_frozen and isinstance(fp8, MasterBase) and not current.is_meta:
            problem = (
                "is stored in FP8, the model's is trainable and would lose its high-precision "
                "values: load into a model that is not converted yet, or with trainable=True, "
                "which replaces these values"
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
            f"model, then convert it; save_fp8 stores all in FP8 with all_in_fp8=True"
        )
    elif ("F" in entry.dtype) != current.is_floating_point():
        problem = f"is {entry.dtype}, the model's is {current.dtype}"
    if problem is not None:
        raise CheckpointError(f"{entry} {problem}")
