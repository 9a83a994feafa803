"""Keep the state of a module, and of the code of its forward, while the forward is tried.

A forward that counts calls or gathers statistics would gather those of drawn weights, and its fused
form would gather none.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .fused_class import Fused

_CONTAINERS = dict, list, deque, set
_NOT_SEARCHED = nn.Module, type, ModuleType, logging.Logger
_MISSING = object()


@contextmanager
def kept_state(module: nn.Module) -> Iterator[Callable[[], str]]:
    """Leave ``module`` as it was: its modes, attributes and the objects that they refer to.

    Yields:
        A function that names what has changed so far, other than modes; empty if nothing has.
    """
    before = [(name, holder, _items(holder)) for name, holder in _holders(module)]
    values = [
        (x, x.clone())
        for _, x, _ in before
        if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)
    ]

    def changed() -> str:
        for name, holder, items in before:
            for key in _differing(items, _items(holder)):
                if key != "training":
                    return name or str(key)
        return ""

    try:
        yield changed
    finally:
        for _, holder, items in before:
            _restore(holder, items)
        for x, old in values:
            with torch.no_grad():
                x.copy_(old)


def _holders(module: nn.Module) -> list[tuple[str, Any]]:
    """Return each object that may change, with the name of the attribute that leads to it.

    Searched are the modules and their classes, with the globals and closures that methods read; in
    these containers and objects, but no other module or class.
    """
    modules = list(module.modules())
    kinds = {x: None for each in modules for x in type(each).__mro__ if _is_of_users(x)}
    todo: list[tuple[str, Any]] = [("", x) for x in (*kinds, *map(vars, modules))]
    found: dict[int, tuple[str, Any]] = {}
    seen: set[int] = set()
    while todo:
        name, x = todo.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, (*_CONTAINERS, Tensor)) or (isinstance(x, type) and x in kinds):
            found[id(x)] = name, x
            named = [("" if key == "_parameters" else key, held) for key, held in _items(x).items()]
            todo += [(name or str(key), held) for key, held in named]
        elif isinstance(x, tuple):
            todo += [(name, held) for held in x]
        elif isinstance(x, FunctionType):
            todo += _read_by(x)
        elif not isinstance(x, _NOT_SEARCHED) and hasattr(x, "__dict__"):
            todo.append((name, vars(x)))
    return list(found.values())


def _is_of_users(kind: type) -> bool:
    is_module = issubclass(kind, nn.Module) and not issubclass(kind, Fused)
    return is_module and not kind.__module__.startswith("torch.")


def _read_by(function: FunctionType) -> list[tuple[str, Any]]:
    """Return the variables of a function's closure, and the globals it reads, with names."""
    code = function.__code__
    names = [(name, function.__globals__.get(name)) for name in code.co_names]
    read = [(name, x) for name, x in names if not isinstance(x, FunctionType)]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it may be empty
            read.append((name, cell.cell_contents))
    return read


def _items(holder: Any) -> dict[Any, Any]:
    """Return the contents of ``holder`` by key; of a tensor its version."""
    if isinstance(holder, Tensor):
        return {"": 0 if holder.is_inference() else holder._version}
    if isinstance(holder, type):
        return {key: x for key, x in vars(holder).items() if not key.startswith("__")}
    return dict(holder if isinstance(holder, dict) else enumerate(holder))


def _differing(old: dict[Any, Any], new: dict[Any, Any]) -> list[Any]:
    """The keys of what is not the same object or number in both."""

    def same(key: Any) -> bool:
        a, b = old.get(key, _MISSING), new.get(key, _MISSING)
        return a is b or (type(a) is type(b) is int and a == b)

    return [key for key in dict.fromkeys((*old, *new)) if not same(key)]


def _restore(holder: Any, items: dict[Any, Any]) -> None:
    """Put ``items`` back into ``holder``; values of tensors are restored elsewhere."""
    changed = _differing(items, _items(holder))
    if not changed or isinstance(holder, Tensor):
        return
    if isinstance(holder, type):
        for key in changed:
            setattr(holder, key, items[key]) if key in items else delattr(holder, key)
        return
    holder.clear()
    if isinstance(holder, (dict, set)):
        holder.update(items if isinstance(holder, dict) else items.values())
    else:
        holder.extend(items.values())
