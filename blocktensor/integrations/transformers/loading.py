"""Take part in transformers' loading and saving, beyond its documented hooks.

- If ``config.json`` names a quantization method, ``from_pretrained`` uses the config in the file,
  and raises if the caller gives one of another class. Here the caller's config counts: this package
  reads checkpoints in FP8 itself, and a checkpoint marked "blocktensor" has ordinary weights.
- ``from_pretrained`` passes all that it is about to load, and the rules by which it renames and
  converts tensors, to one function. No hook of quantizers gets both.
- ``from_pretrained`` reads every tensor by its name and knows no scales. So the FP8 weights are
  hidden from it: they stay on meta, without memory, and are read in the end as by
  :func:`blocktensor.load_fp8`. The files tell which tensors are in FP8, transformers which
  parameter gets each.
- ``save_pretrained(state_dict=...)`` of a quantized model ignores its argument and saves what the
  quantizer returns, without passing the argument to it. Trainer gathers the state of a model under
  FSDP into this argument, so the quantizer reads it from the caller's frame.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.contents import Entry, entries_of, names_of_scales
from ...checkpoint.load import load_matched
from ...checkpoint.match import Matched, match, some
from ...checkpoint.on_disk import CheckpointError
from ...checkpoint.pretrained import Rules
from ...checkpoint.pretrained_reader import PretrainedReader
from ...patches import FP8_LOADING, GIVEN_CONFIG
from ...recipe import Recipe
from ...tensor.torch_internals.callers import Caller
from .config import BlockwiseFP8Config

_METHODS = ("fp8", "compressed-tensors")
"""The methods of checkpoints that may hold E4M3 weights, by their names in ``config.json``."""

_E4M3 = ("F8_E4M3", "torch.float8_e4m3fn")
"""The dtype of FP8 weights, as safetensors and as torch name it."""

_E4M3_FORMAT = "float-quantized"
"""The format of compressed-tensors that stores one E4M3 element a byte."""


@GIVEN_CONFIG.made_by
def _prefer_given_config(theirs: Any) -> Any:
    """Make ``from_pretrained`` take a given BlockwiseFP8Config, whatever the file says."""

    @functools.wraps(theirs)
    def merged(quantization_config: Any, quantization_config_from_args: Any) -> Any:
        if not isinstance(quantization_config_from_args, BlockwiseFP8Config):
            return theirs(quantization_config, quantization_config_from_args)
        entries = dict(quantization_config)
        stored = entries.get("quant_method")
        stored, format = getattr(stored, "value", stored), entries.get("format", _E4M3_FORMAT)
        if stored not in _METHODS or format != _E4M3_FORMAT:
            kind = repr(stored) if format == _E4M3_FORMAT else f"{stored!r}, {format!r}"
            raise ValueError(
                f"the checkpoint is quantized by {kind}, which blocktensor does not read: expected "
                f"{_METHODS[0]!r}, {_METHODS[1]!r} with the format {_E4M3_FORMAT!r}, or a "
                f"checkpoint in high precision; dequantize it with the library that wrote it, then "
                f"convert"
            )
        return quantization_config_from_args

    return staticmethod(merged)


@FP8_LOADING.around
def _announce_loading(
    theirs: Any, model: Any, state_dict: Any, load_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Make ``from_pretrained`` call ``before_loading`` of our quantizer before it loads tensors."""
    quantizer = load_config.hf_quantizer
    if not isinstance(getattr(quantizer, "quantization_config", None), BlockwiseFP8Config):
        return theirs(model, state_dict, load_config, *args, **kwargs)
    rules = load_config.weight_mapping or ()
    ours = quantizer.before_loading(model, state_dict, rules, load_config.device_map)
    if ours is None:
        return theirs(model, state_dict, load_config, *args, **kwargs)
    state = {name: x for name, x in state_dict.items() if name not in ours.stored}
    info, *others = theirs(model, state, load_config, *args, **kwargs)
    info.missing_keys -= ours.weights  # they stay on meta, and take no memory
    return info, *others


def state_given_to_save(asks: Caller) -> dict[str, Any] | None:
    """Return the ``state_dict`` argument of the ``save_pretrained`` that asks for a state."""
    given: Any = asks.local("state_dict") if asks.function == "save_pretrained" else None
    return None if given is None else dict(given)


@dataclass
class FP8Checkpoint:
    """The FP8 weights of a checkpoint, which blocktensor reads.

    Attributes:
        folder: the folder of the checkpoint.
        matched: the sources of these weights.
        stored: the names of the stored tensors that transformers is not to load.
    """

    folder: Path
    matched: Matched
    stored: frozenset[str]

    @property
    def weights(self) -> Set[str]:
        """The names of the weights in the model."""
        return self.matched.sources.keys()

    def load(
        self,
        model: nn.Module,
        recipe: Recipe,
        device: torch.device,
        is_plain: Callable[[torch.Tensor], bool] = lambda _: False,
    ) -> None:
        """Read the weights on ``device``: frozen, or by value where ``is_plain`` returns True.

        Raises:
            CheckpointError: as :func:`blocktensor.load_fp8`; a weight that is not read.
        """
        load_matched(model, self.matched, device, recipe, is_plain)
        left = [name for name, x in model.named_parameters() if x.is_meta]
        if left:
            raise CheckpointError(f"{self.folder}: {len(left)} weights were not read, {left[:5]}")


def fp8_checkpoint(
    model: nn.Module, files: Sequence[str] | None, state: Mapping[str, Any], rules: Rules
) -> FP8Checkpoint | None:
    """Return what is in FP8 of all that transformers is about to load; None if nothing is.

    Args:
        model: on meta.
        files: of the checkpoint, as transformers has found them; None: it was given a state.
        state: the tensors to load, or what safetensors gives for them, by stored names.
        rules: of transformers, by which it renames and converts these tensors.

    Raises:
        CheckpointError: as :func:`blocktensor.load_fp8`; a tensor of 8 bits or fewer that would be
            loaded by value, without its scales; weights in FP8 none of which the model has.
    """
    dtypes = {name: dtype for name, x in state.items() if _is_small(dtype := _dtype(x))}
    if not dtypes:
        return None
    tensors = model.state_dict(keep_vars=True)
    scales = {x for name in dtypes for x in names_of_scales(name)}
    reader = _reader(model, {name: x for name, x in state.items() if name not in scales}, rules)
    targets = {
        name: target
        for target, names in reader.names.items()
        if tensors[target].is_floating_point()
        for name in names & dtypes.keys()
    }
    kind = type(model).__name__
    if not targets:
        _check_names(kind, state, reader.names, tensors)
        return None
    name = next(iter(targets))
    if not files or not all(file.endswith(".safetensors") for file in files):
        raise CheckpointError(
            f"{files[0] if files else 'state_dict'}: tensor {name!r} is {dtypes[name]}, and its "
            f"scales are read from safetensors files only: save the checkpoint in them"
        )
    folder = Path(files[0]).parent
    entries = entries_of(folder)
    if {entry.file for entry in entries.values()} != set(map(Path, files)):
        raise CheckpointError(
            f"{files[0]}: tensor {name!r} is {dtypes[name]}: FP8 is read from all files of a "
            f"folder, under the usual names: keep this variant in a folder of its own"
        )
    matched = match(model, tensors, folder, entries, [reader])
    for name, target in targets.items():
        source = matched.sources.get(target)
        if source is None or not source.is_fp8:
            raise CheckpointError(
                f"{entries[name]} is {entries[name].dtype} and would be loaded into {target!r} of "
                f"a {kind} without its scales: blocktensor reads E4M3 weights, which transformers "
                f"may rename, join and split; dequantize them with the library that wrote them, "
                f"then convert"
            )
    left = {name: x for name in matched.unexpected if (x := entries[name]).is_fp8}
    _check_left(folder, kind, matched, _reader(model, {x: state[x] for x in left}, rules), tensors)
    # what transformers loads is left to it: in high precision it may do more than rename
    ours = {name: x for name, x in matched.sources.items() if x.is_fp8 or x.whole}
    read = {entry.name for x in ours.values() for entry in (*x.weights, *x.scales)}
    return FP8Checkpoint(folder, matched._replace(sources=ours), frozenset(read))


def _reader(model: nn.Module, state: Mapping[str, Any], rules: Rules) -> PretrainedReader:
    entries = {name: Entry(Path(), _dtype(x), _shape(x), name) for name, x in state.items()}
    return PretrainedReader("", model, entries, rules)


def _check_names(
    kind: str, state: Mapping[str, Any], found: Container[str], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Raise CheckpointError if weights of the shapes of the stored FP8 weights get no values.

    Call it if none of the stored FP8 weights belongs to the model.

    Args:
        kind: of the model, for messages.
        state: the stored tensors.
        found: the names of the tensors of the model that get values.
        tensors: of the model, by name.
    """
    stored = {
        name: _shape(x)[-2:]
        for name, x in state.items()
        if _dtype(x) in _E4M3 and any(scale in state for scale in names_of_scales(name))
    }
    held = {id(x) for name, x in tensors.items() if name in found}  # also under tied names
    lacking = [
        name
        for name, x in tensors.items()
        if id(x) not in held and tuple(x.shape[-2:]) in stored.values()
    ]
    if lacking:
        raise CheckpointError(
            f"none of {len(stored)} tensors in FP8 ({some([*stored])}) belongs to a {kind}, whose "
            f"{some(lacking)} would get no values: load the class that the checkpoint was saved "
            f"from, and take its part, or give from_pretrained a key_mapping"
        )


def _check_left(
    folder: Path, kind: str, matched: Matched, reader: PretrainedReader, tensors: Mapping[str, Any]
) -> None:
    """Raise CheckpointError if FP8 weights are left that belong to the model.

    Args:
        folder, kind: of the checkpoint and the model, for messages.
        matched: what was found of the model.
        reader: of the FP8 weights that were left.
        tensors: of the model.
    """
    for target in (*reader.names, *reader.failed, *reader.mismatched):
        source, others = matched.sources.get(target), reader.names.get(target, reader.stored)
        found = "other tensors" if source is None else repr(source.weights[0].name)
        raise CheckpointError(
            f"{folder}: tensors {found} and {min(others)!r} would both be loaded into {target!r}, "
            f"in FP8: remove one of them"
        )
    without = tensors.keys() - matched.sources.keys()
    for name in reader.stored:
        if any(x.endswith(f".{name}") or name.endswith(f".{x}") for x in without):
            raise CheckpointError(
                f"{folder}: tensor {name!r} is in FP8 and has another name in a {kind}: load it "
                f"into the class that the checkpoint was saved from, and take its part"
            )


def _dtype(x: Any) -> str:
    return str(x.dtype if isinstance(x, torch.Tensor) else x.get_dtype())


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape if isinstance(x, torch.Tensor) else x.get_shape())


def _is_small(dtype: str) -> bool:
    """Return whether a dtype has 8 bits or fewer: such elements of weights need scales."""
    named = getattr(torch, dtype.removeprefix("torch."), None)
    if isinstance(named, torch.dtype):
        return named.itemsize == 1 and named is not torch.bool
    return dtype.startswith(("F8", "F6", "F4", "I8", "U8"))
