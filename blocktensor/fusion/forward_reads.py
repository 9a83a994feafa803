"""The values that a forward read when it was verified, and whether one has changed since.

A value is at a :class:`Place`: at the end of a path from the module, or from a file of Python code.
So copies of a module find the places in themselves, and pickles find them in another process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

VALUES = int, float, complex, bool, str, bytes, type(None), tuple, dict
"""Types whose objects are compared by value."""

MISSING = object()
"""The value of an attribute that was not there."""

Step = str | tuple[str, Any]
"""An attribute; or a class of an object, a cell of a function's closure, or an item, by its key."""

Found = tuple[Any, str, Any]
"""An object, the name of an attribute, and its value."""


def class_of(x: Any) -> type:
    """Return the class of an object; of a fused module, the class that it had."""
    return getattr(type(x), "_class_before", None) or type(x)


class Place(NamedTuple):
    """Where a forward reads a value.

    Attributes:
        file: the name of an imported Python module; empty for the ``nn.Module`` itself.
        steps: the way from there.
    """

    file: str = ""
    steps: tuple[Step, ...] = ()

    def at(self, *steps: Step) -> Place:
        """Return the place some steps further."""
        return Place(self.file, self.steps + steps)

    def in_cell(self, index: int) -> Place:
        """Return the place of a variable in the closure of the function that is here."""
        return self.at(("cell", index), "cell_contents")

    def find(self, module: nn.Module) -> Any:
        """Return what is here, in or for ``module``."""
        x: Any = sys.modules[self.file] if self.file else module
        for step in self.steps:
            if isinstance(step, str):
                x = getattr(x, step)
            elif step[0] == "class":
                x = class_of(x).__mro__[step[1]]
            else:
                x = (x.__closure__ if step[0] == "cell" else x)[step[1]]
        return x

    def found(self, module: nn.Module) -> Found:
        """Return the object whose attribute is here, the name of that attribute and its value."""
        holder, name = Place(self.file, self.steps[:-1]).find(module), self.steps[-1]
        assert isinstance(name, str)
        value = getattr(holder, name, MISSING)
        value = dict(value) if isinstance(value, dict) else value
        return holder, name, getattr(value, "__func__", value)


def _differs(now: Any, was: Any) -> bool:
    """Return True for another value than the forward read, if it is another object."""
    if type(was) in VALUES:
        return type(now) is not type(was) or now != was
    return getattr(now, "__func__", now) is not was  # a method is bound anew each time


def _described(value: Any) -> Any:
    """Return a value or a qualified name, equal in every process."""
    if type(value) in VALUES:
        return repr(value)
    if value is MISSING:
        return None
    if isinstance(value, ModuleType):
        return value.__name__
    if hasattr(value, "__dict__") and not isinstance(value, Enum):  # code, or an object's class
        named = value if hasattr(value, "__qualname__") else type(value)
        return named.__module__, named.__qualname__
    return getattr(value, "__qualname__", None) or repr(value)


class Reads:
    """All that a forward read when it was verified.

    Attributes:
        places: of the values.
        found: the objects that hold them, and the values; None in a pickled copy.
        described: the values, as all processes describe them.
        are_traced: True if Dynamo can compare and guard all values: it knows no properties.
    """

    def __init__(
        self, places: Iterable[Place], found: tuple[Found, ...] | None, described: Any = None
    ) -> None:
        self.places, self.found = tuple(places), found
        values = [value for _, _, value in found or ()]
        self.described = described or list(map(_described, values))
        self.are_traced = not any(isinstance(x, property) for x in values)

    @classmethod
    def of(cls, module: nn.Module, places: Iterable[Place]) -> Reads:
        """Return the values that are at ``places`` now."""
        found: dict[tuple[int, str], tuple[Place, Found]] = {}
        for place in places:
            holder, name, value = place.found(module)
            found.setdefault((id(holder), name), (place, (holder, name, value)))
        return cls([place for place, _ in found.values()], tuple(x for _, x in found.values()))

    def have_changed(self) -> bool:
        """Return True if the forward may compute anything else now."""
        if self.found is None:
            return True
        for holder, name, was in self.found:
            now = getattr(holder, name, MISSING)
            if now is not was and _differs(now, was):
                return True
        return False

    def for_loaded(self, module: nn.Module) -> Reads:
        """Return the reads of a module that was unpickled; of none if a value is another here."""
        if self.found is not None:
            return self
        try:
            now = Reads.of(module, self.places)
        except (AttributeError, IndexError, KeyError, TypeError):
            return self
        return now if now.described == self.described else self

    def __deepcopy__(self, memo: Any) -> Reads:
        """Let the copy look at what was copied before it: the modules and settings of the copy."""
        if self.found is None:
            return self
        found = ((memo.get(id(x), x), name, memo.get(id(y), y)) for x, name, y in self.found)
        return Reads(self.places, tuple(found), self.described)

    def __reduce__(self) -> Any:
        return Reads, (self.places, None, self.described)
