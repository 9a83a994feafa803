"""Record the objects that a forward reads by name, and keep modules as they are while it is tried.

A forward reads functions, methods, flags and factors: of the module, its class and the modules in
it, of a config, and of the files that they are written in; and the modules in it without
parameters. A change of one changes the result of the forward. Patterns check hooks and the modules
that have parameters (``mlp.py``).

A forward that counts calls or gathers statistics would gather those of drawn weights while it is
verified, and its fused form would gather none: it runs on copies (:func:`on_copies`), and
:func:`state_of` shows what it changes.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

_VALUES = int, float, bool, str, type(None), tuple
"""Types whose objects are compared by value; of tuples, those of such objects."""

_METHODS = FunctionType, staticmethod, classmethod
_MISSING = object()
_NOT_COPIED = nn.Module, nn.Parameter, type, FunctionType, ModuleType, logging.Logger

_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module, such as its hooks and its mode."""


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
def on_copies(module: nn.Module) -> Iterator[None]:
    """Let the modules in ``module`` use copies of their attributes and buffers, and drop these.

    All that an attribute leads to is copied, except other modules and parameters. Shared are
    closures, variables of classes and files, and attributes that cannot be pickled.
    """
    before = [(each, vars(each)) for each in module.modules()]
    try:
        for each, own in before:
            copies = {key: (copy.copy if key in _OF_TORCH else _copy)(x) for key, x in own.items()}
            copies["_buffers"] = {key: _copy(x) for key, x in each._buffers.items()}
            object.__setattr__(each, "__dict__", copies)
        yield
    finally:
        for each, own in before:
            object.__setattr__(each, "__dict__", own)


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return what attributes and buffers hold, and the versions of parameters, to compare them."""
    state: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        state[name] = 0 if parameter.is_inference() else parameter._version
    for prefix, each in module.named_modules():
        for key, x in (*vars(each).items(), *each._buffers.items()):
            if key not in _OF_TORCH:
                try:
                    state[f"{prefix}.{key}".lstrip(".")] = _pickled(x)[0]
                except Exception:
                    state[f"{prefix}.{key}".lstrip(".")] = id(x)
    return state


class _Pickler(pickle.Pickler):
    """Pickles attributes, but no code, module or parameter that they lead to."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.shared: dict[int, Any] = {}

    def persistent_id(self, x: Any) -> int | None:
        """Return a key of what is not copied."""
        if not isinstance(x, _NOT_COPIED):
            return None
        self.shared[id(x)] = x
        return id(x)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: dict[int, Any]) -> None:
        super().__init__(file)
        self.shared = shared

    def persistent_load(self, key: int) -> Any:
        """Return what was not copied."""
        return self.shared[key]


def _pickled(x: Any) -> tuple[bytes, dict[int, Any]]:
    """Return the pickle of ``x`` and what it shares; raise anything if ``x`` cannot be pickled."""
    pickler = _Pickler(file := io.BytesIO())
    pickler.dump(x)
    return file.getvalue(), pickler.shared


def _copy(x: Any) -> Any:
    """Return a copy, or ``x`` itself if it cannot be pickled."""
    try:
        data, shared = _pickled(x)
        return _Unpickler(io.BytesIO(data), shared).load()
    except Exception:
        return x
