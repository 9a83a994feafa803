"""Load a checkpoint of a base model into a model that has peft's adapters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Replace adapters by the layers that they wrap, if these are on meta, until the ``with`` ends.

    Parameters then have the names of the base model. Layers with values keep their adapters, which
    may have been computed from the values that a load replaces.
    """
    library: Any = sys.modules.get("peft.tuners.tuners_utils")
    places: list[tuple[nn.Module, str, nn.Module]] = []
    for module in () if library is None else model.modules():
        if isinstance(module, library.BaseTunerLayer):
            continue
        for name, child in module._modules.items():
            if isinstance(child, library.BaseTunerLayer):
                places.append((module, name, child))
    try:
        for module, name, child in places:
            base: Any = child
            while isinstance(base, library.BaseTunerLayer):
                base = base.base_layer
            if all(x.is_meta for x in base.parameters()):
                module._modules[name] = base
        yield
    finally:
        for module, name, child in places:
            module._modules[name] = child
