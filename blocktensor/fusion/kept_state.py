"""Keep the state of a module, and of the code of its forward, while the forward is tried.

A forward that counts calls or gathers statistics would gather those of drawn weights, and its fused
form would gather none.
"""

from __future__ import annotations

import copyreg
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .forward_reads import closure_of, names_in
from .fused_class import Fused

_CONTAINERS = dict, list, deque, set
_NOT_SEARCHED = nn.Module, type, ModuleType, logging.Logger
_MISSING = object()
_CONTENT = object()
"""The key of the content of a tensor, an array or a generator."""


@contextmanager
def kept_state(module: nn.Module) -> Iterator[Callable[[], str]]:
    """Leave ``module`` as it was: its modes, attributes and the objects that they refer to.

    Yields:
        A function that names what has changed so far, other than modes; empty if nothing has.
    """
    before = [(name, holder, _items(holder), _copy(holder)) for name, holder in _holders(module)]

    def changed() -> str:
        for name, holder, items, _ in before:
            for key in _differing(items, _items(holder)):
                if key != "training":
                    return name or str(key)
        return ""

    try:
        yield changed
    finally:
        for _, holder, items, content in before:
            _restore(holder, items, content)


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
        elif _is_array(x) or isinstance(x, torch.Generator):
            found[id(x)] = name, x
        elif not isinstance(x, _NOT_SEARCHED):
            todo.append((name, getattr(x, "__dict__", None)))
            if slots := _slots(x):
                found[id(x)] = name, x
                todo += [(name, getattr(x, slot)) for slot in slots]
    return list(found.values())


def _is_array(x: Any) -> bool:
    """Return True for an array of NumPy, which may not be installed."""
    return type(x).__module__ == "numpy" and type(x).__name__ == "ndarray"


def _slots(x: Any) -> list[str]:
    """Return the attributes of an object that are in no dictionary."""
    return [name for name in copyreg._slotnames(type(x)) if hasattr(x, name)]  # type: ignore[attr-defined]


def _is_of_users(kind: type) -> bool:
    is_module = issubclass(kind, nn.Module) and not issubclass(kind, Fused)
    return is_module and not kind.__module__.startswith("torch.")


def _read_by(function: FunctionType) -> list[tuple[str, Any]]:
    """Return the variables of a function's closure, and the globals it reads, with names."""
    names = names_in(function.__code__)
    read = [(name, x) for name, x in function.__globals__.items() if name in names]
    return [
        *((name, x) for name, x in read if not isinstance(x, FunctionType)),
        *closure_of(function),
    ]


def _items(holder: Any) -> dict[Any, Any]:
    """Return what ``holder`` holds, by key; of a tensor its version."""
    if isinstance(holder, Tensor):
        return {_CONTENT: 0 if holder.is_inference() else holder._version}
    if isinstance(holder, torch.Generator):
        return {_CONTENT: tuple(holder.get_state().tolist())}
    if _is_array(holder):
        return {_CONTENT: holder.tobytes()}
    if isinstance(holder, type):
        return {key: x for key, x in vars(holder).items() if not key.startswith("__")}
    if isinstance(holder, _CONTAINERS):
        return dict(holder if isinstance(holder, dict) else enumerate(holder))
    return {key: getattr(holder, key) for key in _slots(holder)}


def _copy(holder: Any) -> Any:
    """Return the content of a tensor, an array or a generator; parameters are others meanwhile."""
    if isinstance(holder, torch.Generator):
        return holder.get_state()
    if _is_array(holder):
        return holder.copy()
    is_buffer = isinstance(holder, Tensor) and not isinstance(holder, nn.Parameter)
    return holder.clone() if is_buffer else None


def _differing(old: dict[Any, Any], new: dict[Any, Any]) -> list[Any]:
    """Return the keys of what is not the same object, number or content in both."""

    def same(key: Any) -> bool:
        a, b = old.get(key, _MISSING), new.get(key, _MISSING)
        return a is b or ((type(a) is type(b) is int or key is _CONTENT) and a == b)

    return [key for key in dict.fromkeys((*old, *new)) if not same(key)]


def _restore(holder: Any, items: dict[Any, Any], content: Any) -> None:
    changed = _differing(items, _items(holder))
    if not changed or isinstance(holder, nn.Parameter):
        return
    if isinstance(holder, Tensor):
        with torch.no_grad():
            holder.copy_(content)
    elif isinstance(holder, torch.Generator):
        holder.set_state(content)
    elif _is_array(holder):
        holder[...] = content
    elif isinstance(holder, _CONTAINERS):
        holder.clear()
        add = holder.extend if isinstance(holder, (list, deque)) else holder.update
        add(items if isinstance(holder, dict) else items.values())
    else:  # attributes of a class, or slots
        for key in changed:
            setattr(holder, key, items[key]) if key in items else delattr(holder, key)
