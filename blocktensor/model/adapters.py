"""Find the modules of peft in a model, without an import of peft."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def is_adapted_layer(module: nn.Module) -> bool:
    """Return True for a layer of peft: a ``base_layer`` with its adapters."""
    library: Any = sys.modules.get("peft.tuners.tuners_utils")
    return library is not None and isinstance(module, library.BaseTunerLayer)


def adapters_of(model: nn.Module) -> set[nn.Module]:
    """Return all modules in layers and tuners of peft that are not in what these adapt."""
    library: Any = sys.modules.get("peft.tuners.tuners_utils")
    if library is None:
        return set()
    found: set[nn.Module] = set()
    for module in model.modules():
        is_tuner = isinstance(module, library.BaseTuner)
        if not (is_tuner or isinstance(module, library.BaseTunerLayer)):
            continue
        adapted = "model" if is_tuner else "base_layer"
        for name, child in module.named_children():
            if name != adapted and not isinstance(child, library.BaseTuner):  # X-LoRA holds LoRA
                found.update(child.modules())
    return found


def names_without_adapters(model: nn.Module) -> dict[nn.Module, str]:
    """Return the name of each module; one that peft has wrapped has the name of its wrapper.

    The copies that peft trains have the name, too. Names of modules in it are as without a wrapper.
    """
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        names.setdefault(module, name)
        for inner in _wrapped_by(module):
            names.update((x, each) for each, x in inner.named_modules(prefix=names[module]))
    return names


def without_adapters(module: nn.Module) -> nn.Module:
    """Return the module of the model that wrappers of peft hold, or the module itself."""
    while wrapped := _wrapped_by(module):
        module = wrapped[0]
    return module


def _wrapped_by(module: nn.Module) -> list[nn.Module]:
    """Return the module of the model that a wrapper of peft holds, and the copies of it."""
    wrappers: Any = sys.modules.get("peft.utils.other")
    if is_adapted_layer(module):
        return [x for name, x in module.named_children() if name == "base_layer"]
    if wrappers is not None and isinstance(module, wrappers.ModulesToSaveWrapper):
        return [module.original_module, *module.modules_to_save.values()]
    return []


def trained_by_peft(model: nn.Module) -> set[nn.Module]:
    """Return adapters, the copies that ``modules_to_save`` trains, and encoders of prompts."""
    wrappers: Any = sys.modules.get("peft.utils.other")
    models: Any = sys.modules.get("peft.peft_model")
    trained = adapters_of(model)
    for module in model.modules():
        held: Any = None
        if wrappers is not None and isinstance(module, wrappers.ModulesToSaveWrapper):
            held = module.modules_to_save
        elif models is not None and isinstance(module, models.PeftModel):
            held = getattr(module, "prompt_encoder", None)
        trained |= set() if held is None else set(held.modules())
    return trained
