"""Load a checkpoint of a base model into a model that has peft's adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..model.adapters import is_adapted_layer


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Replace adapters by the layers that they wrap, if these are on meta, until the ``with`` ends.

    Parameters then have the names of the base model. Layers with values keep their adapters, which
    may have been computed from the values that a load replaces.
    """
    places: list[tuple[nn.Module, str, nn.Module]] = []
    for module in model.modules():
        if is_adapted_layer(module):
            continue
        for name, child in module._modules.items():
            if child is not None and is_adapted_layer(child):
                places.append((module, name, child))
    try:
        for module, name, child in places:
            base: Any = child
            while is_adapted_layer(base):
                base = base.base_layer
            if all(x.is_meta for x in base.parameters()):
                module._modules[name] = base
        yield
    finally:
        for module, name, child in places:
            module._modules[name] = child
