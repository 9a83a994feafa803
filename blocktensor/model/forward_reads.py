"""Record the names that the forward of a module reads, and notice when their values change.

These are functions, methods, flags and factors: of the module, its class and the modules in it, of
a config, and of the files that they are written in. A change of one changes the result of the
forward. ``fused_mlp.py`` and ``fused_norm.py`` check modules and parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

_VALUES = int, float, bool, str, type(None), tuple
"""Types whose objects are compared by value; of tuples, those of such objects."""

_METHODS = FunctionType, staticmethod, classmethod
_MISSING = object()


class Read(NamedTuple):
    """A name that a forward reads, and its value when the forward was verified."""

    holder: Any
    name: str
    value: Any


def has_changed(read: Read) -> bool:
    """Return True if the name has another value now."""
    now, was = getattr(read.holder, read.name, _MISSING), read.value
    if now is was:
        return False
    if type(was) in _VALUES:
        return type(now) is not type(was) or now != was
    return getattr(now, "__func__", now) is not was  # a method is bound anew each time


def is_traced(read: Read) -> bool:
    """Return True if Dynamo can compare the value: it knows no properties."""
    return not _is_computed(read.value)


def described(read: Read) -> Any:
    """Return the name, with a value or a qualified name that is the same in every process."""
    value = read.value
    if type(value) in _VALUES:
        return read.name, value
    return read.name, getattr(value, "__module__", ""), getattr(value, "__qualname__", "")


def names_in(code: CodeType) -> set[str]:
    """Return the names of globals, attributes and methods that code reads."""
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    return set(code.co_names).union(*map(names_in, inner))


def closure_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a function's closure that have a value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it is empty
            continue


def reads_of(module: nn.Module, forward: Any) -> tuple[Read, ...]:
    """Return what ``forward``, a method of ``module``, and the forwards of its children read."""
    inner = [x for x in module._modules.values() if x is not None]
    todo = [(forward, module), *((type(x).forward, x) for x in inner)]
    found: dict[tuple[int, str], Read] = {}
    seen: set[tuple[int, int]] = set()
    while todo:
        function, owner = todo.pop()
        function = getattr(function, "__func__", function)
        key = id(function), id(owner)
        if not isinstance(function, FunctionType) or key in seen:
            continue
        seen.add(key)
        found[id(function), "__code__"] = Read(function, "__code__", function.__code__)
        todo += [(x, owner) for _, x in closure_of(function)]
        for holder, name in _read_by(function, owner):
            value = getattr(holder, name)
            value = getattr(value, "__func__", value)
            if isinstance(value, (Tensor, nn.Module)) or not _is_comparable(value):
                continue
            found.setdefault((id(holder), name), Read(holder, name, value))
            if _is_of_users(value):
                todo.append((getattr(value, "fget", value), owner))
    return tuple(found.values())


def _read_by(function: FunctionType, owner: Any) -> Iterator[tuple[Any, str]]:
    """Yield objects and the names of attributes that ``function``, of ``owner``, may read there."""
    names = names_in(function.__code__)
    holders: list[Any] = []
    file: Any = sys.modules.get(function.__module__)
    if getattr(file, "__dict__", None) is function.__globals__:
        yield from ((file, name) for name in names if name in vars(file))
        holders += [x for name in names if isinstance(x := vars(file).get(name), ModuleType)]
    for kind in type(owner).__mro__:
        for name in names & vars(kind).keys() if _is_of_users(kind) else ():
            yield kind, name
            if name != "forward" and not _is_computed(vars(kind)[name]):
                yield owner, name  # an instance may have one of its own
    own = {name: x for name, x in vars(owner).items() if name in names and name != "training"}
    yield from ((owner, name) for name in own)
    holders += [x for x in own.values() if hasattr(x, "__dict__")]
    for holder in holders:  # more are found on the way
        for name in names & vars(holder).keys():
            yield holder, name
            value = vars(holder)[name]
            if isinstance(value, ModuleType) and value not in holders:
                holders.append(value)


def _is_computed(x: Any) -> bool:
    """Return True for an attribute of a class that is a property or another descriptor."""
    return hasattr(type(x), "__get__") and not isinstance(x, _METHODS)


def _is_comparable(x: Any) -> bool:
    return not isinstance(x, tuple) or all(type(y) in _VALUES and _is_comparable(y) for y in x)


def _is_of_users(x: Any) -> bool:
    return not str(getattr(x, "__module__", "")).startswith(("torch.", "blocktensor."))
