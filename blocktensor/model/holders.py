"""The modules that hold one parameter, inside of the model at hand and outside."""

from __future__ import annotations

import gc
import sys
from typing import Any

from torch import nn

from .linears import is_linear, why_unconvertible


def _references() -> int:
    parameters = {"weight": nn.Parameter()}
    return sys.getrefcount(parameters["weight"])


_HELD_ONCE = _references()
"""What ``sys.getrefcount`` counts for a parameter that one module holds and nobody else."""


def holders_of_weight(module: nn.Module, known: int = 1) -> list[nn.Module]:
    """The modules that hold the parameter ``weight`` of ``module``.

    Args:
        module: a module with a parameter ``weight``.
        known: how many modules are known to hold it. If nothing else refers to the parameter, only
            ``module`` is returned, and the search among all objects is saved (it takes
            milliseconds).
    """
    if sys.getrefcount(module._parameters["weight"]) - _HELD_ONCE < known:
        return [module]
    tables = _dicts(gc.get_referrers(module._parameters["weight"]))
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


def needs_values(linear: nn.Module, known: int = 1) -> str | None:
    """The kind of a module, no linear, that holds the parameter ``weight`` of ``linear`` too.

    Args:
        linear: a module with a parameter ``weight``.
        known: how many modules are known to hold it, all of them linears.
    """
    for holder in holders_of_weight(linear, known):
        if holder is not linear and (why_unconvertible(holder) if is_linear(holder) else True):
            return type(holder).__name__
    return None


def _dicts(objects: list[Any]) -> list[dict[Any, Any]]:
    return [x for x in objects if type(x) is dict]


def _is_in(x: object, objects: list[dict[Any, Any]]) -> bool:
    return any(x is other for other in objects)
