"""A checkpoint in FP8 that transformers is loading: its FP8 weights are read here instead.

transformers reads every tensor by its name and knows of no scales. It is told to drop the values of
FP8 weights, so that these stay on meta and take no memory, and :func:`blocktensor.load_fp8` reads
the bytes in the end. What is in FP8 the files say, and which parameter gets it transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps

from ...checkpoint.contents import Entry, entries_of, scales_of
from ...checkpoint.load import load_entries
from ...checkpoint.match import matched, names_of
from ...checkpoint.names import spellings
from ...checkpoint.on_disk import SCALE_SUFFIXES, CheckpointError
from ...recipe import Recipe
from .transformers_internals import Place, places_of


class FP8Checkpoint:
    """The FP8 weights of a checkpoint.

    Attributes:
        weights: their names in the model.
    """

    def __init__(self, folder: Path, entries: Mapping[str, Entry], weights: frozenset[str]) -> None:
        self.folder = folder
        self.weights = weights
        self._entries = entries

    def load(self, model: nn.Module, recipe: Recipe, device: torch.device) -> None:
        """Read all, the FP8 weights frozen, on ``device``.

        Raises:
            CheckpointError: as :func:`blocktensor.load_fp8`; a weight that is not read.
        """
        load_entries(model, self.folder, self._entries, strict=False, device=device, recipe=recipe)
        left = [name for name, x in model.named_parameters() if x.is_meta]
        if left:
            raise CheckpointError(f"{self.folder}: {len(left)} weights were not read, {left[:5]}")


def fp8_checkpoint(
    model: nn.Module, files: Sequence[str] | None, state: Mapping[str, Any], rules: Sequence[Any]
) -> FP8Checkpoint | None:
    """Return what is in FP8 of all that transformers is about to load; None if nothing is.

    Args:
        model: on meta.
        files: of the checkpoint, as transformers has found them; None: it was given a state.
        state: the tensors to load, or what safetensors gives for them, by stored names.
        rules: of transformers, by which it renames and converts these tensors.

    Raises:
        CheckpointError: as :func:`blocktensor.load_fp8`; a tensor of 8 bits or fewer that would be
            loaded by value, without its scales.
    """
    small = [name for name, x in state.items() if _is_small(x)]
    if not small:
        return None
    current = model.state_dict(keep_vars=True)
    places = places_of(model, [*state, *_bases(state)], rules)
    values = {name: target for name in small if (target := places[name].target) is not None
              if current[target].is_floating_point()}  # fmt: skip
    if not values:
        return None
    name = next(iter(values))
    if not files or not all(file.endswith(".safetensors") for file in files):
        raise CheckpointError(
            f"{files[0] if files else 'state_dict'}: tensor {name!r} is {_dtype(state[name])}, and "
            f"its scales are read from safetensors files only: save the checkpoint in them"
        )
    folder = Path(files[0]).parent
    stored = entries_of(folder)
    if {entry.file for entry in stored.values()} != set(map(Path, files)):
        raise CheckpointError(
            f"{files[0]}: tensor {name!r} is {_dtype(state[name])}: FP8 is read from all files of "
            f"a folder, under the usual names: keep this variant in a folder of its own"
        )
    known = spellings(model)
    spelled = {name for ways in known.values() for way in ways for name in names_of(way)}
    keys = {name: _key(name, places, spelled) for name in stored}
    entries: dict[str, Entry] = {}
    for name in places:
        if name not in stored or places[name].how == "computed":
            continue
        entry = entries.setdefault(keys[name], stored[name])
        if entry.name != name and (entry.is_fp8 or stored[name].is_fp8):
            raise CheckpointError(
                f"{folder}: tensors {entry.name!r} and {name!r} would both be loaded into "
                f"{keys[name]!r}, in FP8: remove one of them"
            )
    scales = set(scales_of(entries).values())
    found = matched(folder, known, entries.keys() - scales)
    for name, target in values.items():
        way = found.get(target)
        if way is None or keys[name] not in names_of(way) or not stored[name].is_fp8:
            raise CheckpointError(
                f"{stored[name].file}: tensor {name!r} is {stored[name].dtype} and would be loaded "
                f"into {target!r} of a {type(model).__name__} without its scales: blocktensor "
                f"reads E4M3 weights, and stacks of experts, that transformers renames at most; "
                f"dequantize them with the library that wrote them, then convert"
            )
    taken = {name for way in found.values() for name in names_of(way)}
    without = current.keys() - found.keys()
    for name, entry in entries.items():
        fits = any(x.endswith(f".{name}") or name.endswith(f".{x}") for x in without)
        if entry.is_fp8 and name not in taken and fits:
            raise CheckpointError(
                f"{folder}: tensor {entry.name!r} is in FP8 and has another name in a "
                f"{type(model).__name__}: load it into the class that the checkpoint was "
                f"saved from, and take its part"
            )
    in_fp8 = (name for name, way in found.items() if entries[names_of(way)[0]].is_fp8)
    return FP8Checkpoint(folder, entries, frozenset(in_fp8))


def _is_small(x: Any) -> bool:
    """Return whether a tensor's elements have 8 bits or fewer: those of weights need scales."""
    if isinstance(x, torch.Tensor):
        return x.dtype.itemsize == 1 and x.dtype is not torch.bool
    return _dtype(x).startswith(("F8", "F6", "F4", "I8", "U8"))


def _dtype(x: Any) -> str:
    return str(x.dtype if isinstance(x, torch.Tensor) else x.get_dtype())


def _bases(names: Iterable[str]) -> list[str]:
    """Return the names that end as names of scales do, without that ending."""
    return [name.removesuffix(suffix) for name in names for suffix in SCALE_SUFFIXES.values()
            if name.endswith(suffix)]  # fmt: skip


def _key(name: str, places: Mapping[str, Place], spelled: Set[str]) -> str:
    """Return the name by which a stored tensor is matched with the model, by its place there."""
    place = places[name]
    for suffix in SCALE_SUFFIXES.values():
        if place.target is None and name.endswith(suffix):
            return _key(name.removesuffix(suffix), places, spelled) + suffix
    if place.how == "stacked":
        return next((x for x in (*place.renamed, name) if x in spelled), name)
    return place.target or name


class DropValues(ConversionOps):  # type: ignore[misc,unused-ignore]
    """Leaves a parameter on meta, as one that will be read later."""

    def convert(self, input_dict: Mapping[str, Any], *_: Any, **kwargs: Any) -> dict[str, Any]:
        if kwargs.get("missing_keys") is not None:
            kwargs["missing_keys"].discard(kwargs["full_layer_name"])
        return {}


SCALES = {rf"{suffix}$" for suffix in SCALE_SUFFIXES.values()}
"""Patterns of names that transformers shall not report as unexpected."""
