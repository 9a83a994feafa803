"""What the integration knows of transformers beyond its documented hooks.

- ``from_pretrained`` of a checkpoint whose ``config.json`` names a quantization method takes the
  config in the file, and raises for one of another class. The weights of a checkpoint in FP8 are
  ours to read, and those of one marked "blocktensor" are ordinary: what the caller gives decides.
- ``from_pretrained`` passes all that it is about to load, and the rules by which it renames and
  converts tensors, to one function. No hook of quantizers gets both.
- ``save_pretrained(state_dict=...)`` of a quantized model drops its argument for what the quantizer
  returns, and asks it for that without the argument. Trainer gathers the state of a model under
  FSDP into this argument.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from torch import nn
from transformers import core_model_loading, modeling_utils
from transformers.quantizers.auto import AutoHfQuantizer

from .config import METHOD, BlockwiseFP8Config

_FP8_METHODS = ("fp8", "compressed-tensors")
"""The methods of checkpoints that ``load_fp8`` reads, by their names in ``config.json``."""

_LOADING = "convert_and_load_state_dict_in_model"


def prefer_given_config() -> None:
    """Make ``from_pretrained`` take a given BlockwiseFP8Config, whatever the file says."""
    theirs = AutoHfQuantizer.merge_quantization_configs
    if getattr(theirs, "is_of_blocktensor", False):
        return

    def merged(quantization_config: Any, quantization_config_from_args: Any) -> Any:
        if not isinstance(quantization_config_from_args, BlockwiseFP8Config):
            return theirs(quantization_config, quantization_config_from_args)
        stored = dict(quantization_config).get("quant_method")
        stored = getattr(stored, "value", stored)
        if stored == METHOD:
            return quantization_config_from_args
        if stored not in _FP8_METHODS:
            raise ValueError(
                f"the checkpoint is quantized by {stored!r}, which blocktensor does not read: "
                f"expected {', '.join(map(repr, _FP8_METHODS))} or a checkpoint in high precision; "
                f"dequantize it with the library that wrote it, then convert"
            )
        return quantization_config_from_args

    merged.is_of_blocktensor = True  # type: ignore[attr-defined]
    setattr(AutoHfQuantizer, "merge_quantization_configs", staticmethod(merged))  # noqa: B010


def announce_loading() -> None:
    """Make ``from_pretrained`` call ``before_loading`` of our quantizer before it loads tensors."""
    theirs = getattr(modeling_utils, _LOADING)
    if getattr(theirs, "is_of_blocktensor", False):
        return

    def announced(model: Any, state_dict: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        quantizer = load_config.hf_quantizer
        if isinstance(getattr(quantizer, "quantization_config", None), BlockwiseFP8Config):
            rules = load_config.weight_mapping or ()
            quantizer.before_loading(model, state_dict, rules, load_config.device_map)
        return theirs(model, state_dict, load_config, *args, **kwargs)

    announced.is_of_blocktensor = True  # type: ignore[attr-defined]
    setattr(modeling_utils, _LOADING, announced)


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

    def rename(name: str, rules: Sequence[Any], converts: bool = True) -> tuple[str, str | None]:
        renamings = [x for x in rules if isinstance(x, core_model_loading.WeightRenaming)]
        converters = [x for x in rules if isinstance(x, core_model_loading.WeightConverter)]
        found: tuple[str, str | None] = core_model_loading.rename_source_key(
            name, renamings, converters if converts else [], prefix, state
        )
        return found

    operations = {
        pattern: x.operations
        for x in rules
        if isinstance(x, core_model_loading.WeightConverter)
        for pattern in x.source_patterns
    }
    places = {}
    for name in sorted(names, key=core_model_loading.dot_natural_key):  # as transformers
        target, pattern = rename(name, full)
        renamed, _ = rename(name, only_renamed, converts=False)
        if target not in state and name in state:
            target, pattern = rename(name, [])
        how = "alone"
        if pattern is not None:
            stacks = all(isinstance(x, _STACKING) for x in operations[pattern])
            how = "stacked" if stacks else "computed"
        with_prefix = renamed, f"{prefix}.{renamed}", renamed.removeprefix(f"{prefix}.")
        places[name] = Place(target if target in state else None, with_prefix, how)
    return places


def state_given_to_save(caller: FrameType | None) -> dict[str, Any] | None:
    """The ``state_dict`` argument of the ``save_pretrained`` that asks for a state."""
    if caller is None or caller.f_code.co_name != "save_pretrained":
        return None
    given = caller.f_locals.get("state_dict")
    return given if isinstance(given, dict) else None
