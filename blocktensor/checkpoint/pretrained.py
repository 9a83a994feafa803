"""Run transformers' own functions to see how it saves and loads the tensors of a model.

transformers renames, joins, splits and stacks tensors as it loads, and reverts this as it saves, by
rules for each kind of model. Its functions get traced tensors here. They act on a skeleton of the
model, so that the model does not change. transformers before version 5 has no such rules.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..model.weights import unsharded_class
from ..patches import PROGRESS_BAR

Rules = Sequence[Any]
"""The rules by which transformers renames and converts tensors when it loads them."""


def has_rules() -> bool:
    """Return True if the installed transformers, from version 5 on, loads tensors by rules."""
    return importlib.util.find_spec("transformers.core_model_loading") is not None


def pretrained_models(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Find the outermost models of transformers in a module, each with the prefix of its names."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    inside: list[str] = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, library.PreTrainedModel) and not prefix.startswith(tuple(inside)):
            inside.append(prefix)
            yield prefix, module


def skeleton(model: nn.Module) -> nn.Module:
    """Copy the modules of a model, with plain tensors on meta, and without hooks.

    No constructor runs. ``fully_shard`` and others replace the class of a module; the copies have
    the original class.
    """
    modules: dict[nn.Module, nn.Module] = {}
    tensors: dict[int, Tensor] = {}

    def tensor(x: Tensor | None) -> Any:
        if x is None:
            return None
        if id(x) not in tensors:
            like = torch.empty(x.shape, dtype=x.dtype, device="meta")
            is_parameter = isinstance(x, nn.Parameter)
            tensors[id(x)] = nn.Parameter(like, requires_grad=False) if is_parameter else like
        return tensors[id(x)]

    def module(x: nn.Module | None) -> nn.Module | None:
        if x is None:
            return None
        if x not in modules:
            bare: nn.Module = object.__new__(unsharded_class(x))
            modules[x] = bare
            vars(bare).update({**vars(x), **vars(nn.Module()), "training": x.training})
            bare._non_persistent_buffers_set.update(x._non_persistent_buffers_set)
            bare._parameters.update({name: tensor(value) for name, value in x._parameters.items()})
            bare._buffers.update({name: tensor(value) for name, value in x._buffers.items()})
            bare._modules.update({name: module(value) for name, value in x._modules.items()})
        return modules[x]

    bare = module(model)
    assert bare is not None
    # What save_pretrained reverts depends on the checkpoint that a model was loaded from: names of
    # a dequantized FP8 checkpoint would be lost, and equal models would get different names.
    vars(bare).pop("_weight_conversions", None)
    return bare


def saved(twin: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that ``save_pretrained`` would write, by their names in the checkpoint.

    Args:
        twin: a skeleton of the model.
        tensors: by their names in the model, traced or with values.
    """
    library = importlib.import_module("transformers.core_model_loading")
    made = library.revert_weight_conversion(twin, dict(tensors))
    return {name: x[0] if isinstance(x, (list, tuple)) else x for name, x in made.items()}


class Loaded(NamedTuple):
    """The tensors that ``from_pretrained`` loads into a model, and its errors.

    Attributes:
        tensors: the tensors of the model that are loaded, by name.
        mismatched: names of tensors of the model that would get a tensor of another shape, with
            that shape.
        errors: why tensors of the model, by name, cannot be computed.
    """

    tensors: dict[str, Tensor]
    mismatched: dict[str, tuple[int, ...]]
    errors: dict[str, str]


def rules_of(twin: nn.Module, quantizer: Any = None) -> Rules:
    """Return the rules of a model; transformers' ``quantizer`` may add some."""
    library = importlib.import_module("transformers.conversion_mapping")
    rules: Rules = library.get_model_conversion_mapping(twin, None, quantizer)
    return rules


def loaded(
    twin: nn.Module,
    stored: Mapping[str, Tensor],
    rules: Rules,
    quantizer: Any = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Loaded:
    """Load stored tensors, traced or with values, into a skeleton of a model.

    Args:
        twin: the skeleton, which changes.
        stored: by their names in the checkpoint.
        rules: of the model.
        quantizer: transformers' quantizer that has prepared ``twin``.
        dtypes: the dtypes to cast to, by patterns of names; default: the model's.
    """
    library = importlib.import_module("transformers.core_model_loading")
    before = [*twin.state_dict(keep_vars=True).values()]  # kept alive, so that no id is reused
    how = SimpleNamespace(
        hf_quantizer=quantizer,
        weight_mapping=copy.deepcopy(list(rules)),  # a copy, since some rules have a state
        dtype_plan=dtypes,
        **dict.fromkeys(("dtype", "device_map", "disk_offload_folder")),
        offload_buffers=False,
    )
    with PROGRESS_BAR.during():
        info, _ = library.convert_and_load_state_dict_in_model(twin, dict(stored), how)
    empty, after = set(map(id, before)), twin.state_dict(keep_vars=True)
    made = {name: x for name, x in after.items() if isinstance(x, Tensor) and id(x) not in empty}
    mismatched = {name: tuple(shape) for name, shape, *_ in info.mismatched_keys}
    errors = {name: text.strip().splitlines() for name, text in info.conversion_errors.items()}
    return Loaded(made, mismatched, {name: lines[-2:][0] for name, lines in errors.items()})


@PROGRESS_BAR.made_by
def _no_progress_bar(is_shown: bool) -> bool:
    """Show no progress of a load without values."""
    return False
