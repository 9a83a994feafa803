"""Find the adapters of peft in a model, without an import of peft."""

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
