"""The modules that hold one parameter, inside of the model at hand and outside."""

from __future__ import annotations

import gc
import sys
from typing import Any

from torch import nn

from .product_weights import fp8_weights, weights_of, why_unconvertible


def _references() -> int:
    parameters = {"weight": nn.Parameter()}
    return sys.getrefcount(parameters["weight"])


_HELD_ONCE = _references()
"""What ``sys.getrefcount`` counts for a parameter that one module holds and nobody else."""


def holders_of_weight(module: nn.Module, known: int = 1, key: str = "weight") -> list[nn.Module]:
    """The modules that hold the parameter ``key`` of ``module``.

    Args:
        module: a module with this parameter.
        key: its name.
        known: how many modules are known to hold it. If nothing else refers to the parameter, only
            ``module`` is returned, and the search among all objects is saved (it takes
            milliseconds).
    """
    if sys.getrefcount(module._parameters[key]) - _HELD_ONCE < known:
        return [module]
    tables = _dicts(gc.get_referrers(module._parameters[key]))
    if len(tables) == 1:  # a search takes long
        return [module]
    # Modules keep their attributes in a dict; from Python 3.13 on also without one.
    attributes = [
        x for x in _dicts(gc.get_referrers(*tables)) if _is_in(x.get("_parameters"), tables)
    ]
    owners = [*gc.get_referrers(*tables), *gc.get_referrers(*attributes)]
    found = {
        id(x): x for x in owners if issubclass(type(x), nn.Module) and _is_in(x._parameters, tables)
    }
    owners.clear()  # it may hold a list that is held by it
    return list(found.values())


def needs_values(module: nn.Module, known: int = 1, key: str = "weight") -> str | None:
    """The kind of a module that holds a weight of ``module`` too, and not for products alone.

    Args:
        module: a module with a parameter ``key``: a linear, or experts.
        known: how many modules are known to hold it, all of them for products.
        key: its name.
    """
    for holder in holders_of_weight(module, known, key):
        if holder is not module and not _multiplies(holder, module._parameters[key]):
            return type(holder).__name__
    return None


def _multiplies(holder: nn.Module, parameter: object) -> bool:
    """Whether a module holds a parameter as a weight that its products read, and no more."""
    read = {*weights_of(holder), *fp8_weights(holder)}
    keys = [key for key, held in holder._parameters.items() if held is parameter]
    return all(key in read and why_unconvertible(holder, key) is None for key in keys)


def _dicts(objects: list[Any]) -> list[dict[Any, Any]]:
    return [x for x in objects if type(x) is dict]


def _is_in(x: object, objects: list[dict[Any, Any]]) -> bool:
    return any(x is other for other in objects)
