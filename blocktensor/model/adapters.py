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
    """Return all modules in layers of peft that are not in the ``base_layer`` of these."""
    return {
        module
        for layer in filter(is_adapted_layer, model.modules())
        for name, child in layer.named_children()
        if name != "base_layer"
        for module in child.modules()
    }


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
