"""Record the objects that a forward reads by name, and undo the changes that it makes.

A forward reads functions, methods, flags and factors: of the module, its class and the modules in
it, of a config, and of the files that they are written in; and the modules in it without
parameters. A change of one changes the result of the forward. Patterns check hooks and the modules
that have parameters (``mlp.py``).

A forward that counts calls or gathers statistics would gather those of drawn weights while it is
verified, and its fused form would gather none: :func:`kept_state` undoes and names such changes.
"""

from __future__ import annotations

import copyreg
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_VALUES = int, float, bool, str, type(None), tuple
"""Types whose objects are compared by value; of tuples, those of such objects."""

_METHODS = FunctionType, staticmethod, classmethod
_MISSING = object()
_CONTAINERS = dict, list, deque, set
_NOT_SEARCHED = nn.Module, type, ModuleType, logging.Logger
_CONTENT = object()
"""The key of the content of a tensor, an array or a generator."""


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


def _described(read: Read) -> Any:
    """Return the name, with a value or a qualified name, equal in every process."""
    value = read.value
    if type(value) in _VALUES:
        return read.name, value
    return read.name, getattr(value, "__module__", ""), getattr(value, "__qualname__", "")


class Reads:
    """All that a forward read when it was verified.

    Attributes:
        found: the names and values; None in a pickled copy.
        are_traced: True if Dynamo can compare and guard all values: it knows no properties.
        names: a description, equal in every process.
    """

    def __init__(self, found: tuple[Read, ...] | None, names: Any = None) -> None:
        self.found = found
        self.are_traced = not any(_is_computed(read.value) for read in found or ())
        # names of code come in no order
        self.names = names or sorted(map(_described, found or ()), key=repr)

    def have_changed(self) -> bool:
        """Return True if the forward may compute anything else now."""
        return self.found is None or any(map(has_changed, self.found))

    def __deepcopy__(self, memo: Any) -> Reads:
        """Let the copy look at what was copied before it: the modules and settings of the copy."""
        if self.found is None:
            return self
        found = (Read(memo.get(id(x), x), name, memo.get(id(y), y)) for x, name, y in self.found)
        return Reads(tuple(found), self.names)

    def __reduce__(self) -> Any:
        return Reads, (None, self.names)


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


def reads_of(module: nn.Module, kind: Any) -> tuple[Read, ...]:
    """Return what the forward of ``module`` reads, which is that of its class ``kind``."""
    inner = {name: x for name, x in module._modules.items() if x is not None}
    places: list[tuple[Any, str]] = [(kind, "forward")]
    places += [(type(x), name) for x in inner.values() for name in ("forward", "__call__")]
    places += [(module, name) for name, x in inner.items() if not any(True for _ in x.parameters())]
    todo = [(kind.forward, module), *((type(x).forward, x) for x in inner.values())]
    found: dict[tuple[int, str], Read] = {}
    seen: set[tuple[int, int]] = set()
    while todo:
        function, owner = todo.pop()
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType) and (id(function), id(owner)) not in seen:
            seen.add((id(function), id(owner)))
            todo += [(x, owner) for _, x in closure_of(function)]
            for holder, name in _read_by(function, owner):
                value = getattr(holder, name)
                value = getattr(value, "__func__", value)
                if not isinstance(value, (Tensor, nn.Module)) and _is_comparable(value):
                    places.append((holder, name))
                    if _is_of_users(value):
                        todo.append((getattr(value, "fget", value), owner))
    for holder, name in places:
        value = getattr(holder, name)
        found[id(holder), name] = Read(holder, name, getattr(value, "__func__", value))
    return tuple(found.values())


def _read_by(function: FunctionType, owner: Any) -> Iterator[tuple[Any, str]]:
    """Yield objects and the names of attributes that ``function``, of ``owner``, may read there."""
    yield function, "__code__"
    names = names_in(function.__code__)
    holders: list[Any] = []
    file: Any = sys.modules.get(function.__module__)
    if getattr(file, "__dict__", None) is function.__globals__:
        yield from ((file, name) for name in names & vars(file).keys())
        holders += [x for name in names if isinstance(x := vars(file).get(name), ModuleType)]
    for kind in type(owner).__mro__:
        for name in names & vars(kind).keys() if _is_of_users(kind) else ():
            yield kind, name
            if name != "forward" and not _is_computed(vars(kind)[name]):
                yield owner, name  # an instance may have one of its own
    own = names & vars(owner).keys() - {"training"}
    yield from ((owner, name) for name in own)
    holders += [x for name in own if hasattr(x := vars(owner)[name], "__dict__")]
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


# State


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
    all_kinds = (x for each in modules for x in type(each).__mro__ if issubclass(x, nn.Module))
    kinds = {x: None for x in all_kinds if _is_of_users(x)}
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
            todo += _variables_of(x)
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


def _variables_of(function: FunctionType) -> list[tuple[str, Any]]:
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
