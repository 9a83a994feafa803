"""Take part in transformers' loading and saving, beyond its documented hooks.

- ``from_pretrained`` of a checkpoint whose ``config.json`` names a quantization method takes the
  config in the file, and raises for one of another class. The weights of a checkpoint in FP8 are
  ours to read, and those of one marked "blocktensor" are ordinary: what the caller gives decides.
- ``from_pretrained`` passes all that it is about to load, and the rules by which it renames and
  converts tensors, to one function. No hook of quantizers gets both.
- It reads every tensor by its name and knows of no scales. It is told to drop the values of FP8
  weights, so that these stay on meta and take no memory, and :func:`blocktensor.load_fp8` reads the
  bytes in the end. What is in FP8 the files say, and which parameter gets it transformers.
- ``save_pretrained(state_dict=...)`` of a quantized model drops its argument for what the quantizer
  returns, and asks it for that without the argument. Trainer gathers the state of a model under
  FSDP into this argument.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import core_model_loading, modeling_utils
from transformers.quantizers.auto import AutoHfQuantizer

from ...checkpoint.contents import Entry, entries_of
from ...checkpoint.load import load_entries
from ...checkpoint.match import match
from ...checkpoint.names import possible_names
from ...checkpoint.on_disk import SCALE_SUFFIX, CheckpointError
from ...recipe import Recipe
from ...tensor.compat.callers import Caller
from .config import BlockwiseFP8Config

_FP8_METHOD = "fp8"
"""The method of checkpoints that ``load_fp8`` reads, by its name in ``config.json``."""

_LOADING = "convert_and_load_state_dict_in_model"


def prefer_given_config() -> None:
    """Make ``from_pretrained`` take a given BlockwiseFP8Config, whatever the file says."""
    theirs = AutoHfQuantizer.merge_quantization_configs

    def merged(quantization_config: Any, quantization_config_from_args: Any) -> Any:
        if not isinstance(quantization_config_from_args, BlockwiseFP8Config):
            return theirs(quantization_config, quantization_config_from_args)
        stored = dict(quantization_config).get("quant_method")
        stored = getattr(stored, "value", stored)
        if stored != _FP8_METHOD:
            raise ValueError(
                f"the checkpoint is quantized by {stored!r}, which blocktensor does not read: "
                f"expected {_FP8_METHOD!r} or a checkpoint in high precision; "
                f"dequantize it with the library that wrote it, then convert"
            )
        return quantization_config_from_args

    setattr(AutoHfQuantizer, "merge_quantization_configs", staticmethod(merged))  # noqa: B010


def announce_loading() -> None:
    """Make ``from_pretrained`` call ``before_loading`` of our quantizer before it loads tensors."""
    theirs = getattr(modeling_utils, _LOADING)

    def announced(model: Any, state_dict: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        quantizer = load_config.hf_quantizer
        if isinstance(getattr(quantizer, "quantization_config", None), BlockwiseFP8Config):
            rules = load_config.weight_mapping or ()
            quantizer.before_loading(model, state_dict, rules, load_config.device_map)
        return theirs(model, state_dict, load_config, *args, **kwargs)

    setattr(modeling_utils, _LOADING, announced)


def state_given_to_save(asks: Caller) -> dict[str, Any] | None:
    """Return the ``state_dict`` argument of the ``save_pretrained`` that asks for a state."""
    given = asks.local("state_dict") if asks.function == "save_pretrained" else None
    return given if isinstance(given, dict) else None


class Place(NamedTuple):
    """Where transformers loads a stored tensor.

    Attributes:
        target: the name of the parameter or buffer that gets it; None if the model has none.
        renamed: the names that the tensor may have by the model's names of modules.
        how: "alone", as it is; "stacked", as a part of a stack of experts; "computed", otherwise.
    """

    target: str | None
    renamed: tuple[str, ...]
    how: str


_STACKING = (core_model_loading.MergeModulelist, core_model_loading.Concatenate)


def places_of(model: nn.Module, names: Iterable[str], rules: Sequence[Any]) -> dict[str, Place]:
    """Return where transformers loads stored tensors, by their names.

    Args:
        model: on meta.
        names: of the stored tensors.
        rules: of transformers, by which it renames and converts them.
    """
    state, prefix = model.state_dict(keep_vars=True), str(model.base_model_prefix)
    full, only_renamed = copy.deepcopy(rules), copy.deepcopy(rules)  # some rules have a state
    converters = core_model_loading.WeightConverter

    def rename(name: str, rules: Sequence[Any], converts: bool = True) -> tuple[str, str | None]:
        renamings = [x for x in rules if isinstance(x, core_model_loading.WeightRenaming)]
        converting = [x for x in rules if converts and isinstance(x, converters)]
        found: tuple[str, str | None] = core_model_loading.rename_source_key(
            name, renamings, converting, prefix, state
        )
        return found

    stacking = {
        pattern: all(isinstance(operation, _STACKING) for operation in x.operations)
        for x in rules
        if isinstance(x, converters)
        for pattern in x.source_patterns
    }
    places = {}
    for name in sorted(names, key=core_model_loading.dot_natural_key):  # as transformers
        target, pattern = rename(name, full)
        renamed, _ = rename(name, only_renamed, converts=False)
        if target not in state and name in state:
            target, pattern = rename(name, [])
        how = "alone" if pattern is None else "stacked" if stacking[pattern] else "computed"
        with_prefix = renamed, f"{prefix}.{renamed}", renamed.removeprefix(f"{prefix}.")
        places[name] = Place(target if target in state else None, with_prefix, how)
    return places


@dataclass
class FP8Checkpoint:
    """The FP8 weights of a checkpoint.

    Attributes:
        folder: where it is.
        entries: the stored tensors, by names to match with the model.
        weights: the names of FP8 weights in the model.
    """

    folder: Path
    entries: Mapping[str, Entry]
    weights: frozenset[str]

    def load(self, model: nn.Module, recipe: Recipe, device: torch.device) -> None:
        """Read all, the FP8 weights frozen, on ``device``.

        Raises:
            CheckpointError: as :func:`blocktensor.load_fp8`; a weight that is not read.
        """
        load_entries(model, self.folder, self.entries, strict=False, device=device, recipe=recipe)
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
    dtypes = {name: dtype for name, x in state.items() if _is_small(dtype := _dtype(x))}
    if not dtypes:
        return None
    current = model.state_dict(keep_vars=True)
    places = places_of(model, [*state, *_without_suffix(state)], rules)
    targets = {
        name: target
        for name in dtypes
        if (target := places[name].target) is not None and current[target].is_floating_point()
    }
    if not targets:
        return None
    name = next(iter(targets))
    if not files or not all(file.endswith(".safetensors") for file in files):
        raise CheckpointError(
            f"{files[0] if files else 'state_dict'}: tensor {name!r} is {dtypes[name]}, and its "
            f"scales are read from safetensors files only: save the checkpoint in them"
        )
    folder = Path(files[0]).parent
    stored = entries_of(folder)
    if {entry.file for entry in stored.values()} != set(map(Path, files)):
        raise CheckpointError(
            f"{files[0]}: tensor {name!r} is {dtypes[name]}: FP8 is read from all files of a "
            f"folder, under the usual names: keep this variant in a folder of its own"
        )
    known = possible_names(model)
    spelled = {name for ways in known.values() for way in ways for name in way.all}
    keys = {name: _key(name, places, spelled) for name in stored}
    entries: dict[str, Entry] = {}
    for name, place in places.items():
        if name not in stored or place.how == "computed":
            continue
        entry = entries.setdefault(keys[name], stored[name])
        if entry.name != name and (entry.is_fp8 or stored[name].is_fp8):
            raise CheckpointError(
                f"{folder}: tensors {entry.name!r} and {name!r} would both be loaded into "
                f"{keys[name]!r}, in FP8: remove one of them"
            )
    sources, unmatched = match(folder, known, entries)
    kind = type(model).__name__
    for name, target in targets.items():
        entry = stored[name]
        if not entry.is_fp8 or target not in sources or entry not in sources[target].weights:
            raise CheckpointError(
                f"{entry} is {entry.dtype} and would be loaded into {target!r} of a {kind} without "
                f"its scales: blocktensor reads E4M3 weights, and stacks of experts, that "
                f"transformers renames at most; dequantize them with the library that wrote them, "
                f"then convert"
            )
    without = current.keys() - sources.keys()
    for name in unmatched:
        fits = any(x.endswith(f".{name}") or name.endswith(f".{x}") for x in without)
        if entries[name].is_fp8 and fits:
            raise CheckpointError(
                f"{folder}: tensor {entries[name].name!r} is in FP8 and has another name in a "
                f"{kind}: load it into the class that the checkpoint was saved from, and take its "
                f"part"
            )
    in_fp8 = (name for name, source in sources.items() if source.is_fp8)
    return FP8Checkpoint(folder, entries, frozenset(in_fp8))


def _dtype(x: Any) -> str:
    return str(x.dtype if isinstance(x, torch.Tensor) else x.get_dtype())


def _is_small(dtype: str) -> bool:
    """Return whether a dtype has 8 bits or fewer: such elements of weights need scales."""
    named = getattr(torch, dtype.removeprefix("torch."), None)
    if isinstance(named, torch.dtype):
        return named.itemsize == 1 and named is not torch.bool
    return dtype.startswith(("F8", "F6", "F4", "I8", "U8"))


def _without_suffix(names: Iterable[str]) -> list[str]:
    """Return the names that end as names of scales do, without that ending."""
    return [x.removesuffix(SCALE_SUFFIX) for x in names if x.endswith(SCALE_SUFFIX)]


def _key(name: str, places: Mapping[str, Place], spelled: Set[str]) -> str:
    """Return the name by which a stored tensor is matched with the model, by its place there."""
    place = places[name]
    if place.target is None and name.endswith(SCALE_SUFFIX):
        return _key(name.removesuffix(SCALE_SUFFIX), places, spelled) + SCALE_SUFFIX
    if place.how == "stacked":
        return next((x for x in (*place.renamed, name) if x in spelled), name)
    return place.target or name


class DropValues(core_model_loading.ConversionOps):  # type: ignore[misc,unused-ignore]
    """Leaves a parameter on meta, as one that will be read later."""

    def convert(self, input_dict: Mapping[str, Any], *_: Any, **kwargs: Any) -> dict[str, Any]:
        if kwargs.get("missing_keys") is not None:
            kwargs["missing_keys"].discard(kwargs["full_layer_name"])
        return {}
