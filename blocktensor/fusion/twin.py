"""A copy of an object that shows every attribute that is read from it to a recorder.

The copy is of a class derived from the object's, and holds the same values: what is written to it
does not reach the object. Nothing of the object's class runs when the copy is made or freed.
"""

from __future__ import annotations

import copy
import sys
from abc import ABCMeta
from collections.abc import Iterator
from types import CodeType, MemberDescriptorType, SimpleNamespace
from typing import Any, Protocol

from torch import Tensor, nn

from .forward_reads import MISSING, VALUES, Place, class_of

OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module, such as its hooks and its mode."""

_HEAP_TYPE = 1 << 9
"""CPython's flag of classes that are written in Python."""


class Reader(Protocol):
    """What twins show their attributes to."""

    def read(self, twin: Twin, name: str, value: Any, code: CodeType) -> Any:
        """Return what ``code`` gets for an attribute with this value."""

    def missing(self, twin: Twin, name: str, code: CodeType) -> None:
        """Take notice that ``code`` asked for an attribute that the object has not."""


class Twin:
    """An object and its copy.

    Attributes:
        original: the object.
        made: its copy.
        place: of the object.
    """

    def __init__(self, original: Any, place: Place, reader: Reader) -> None:
        self.original, self.place = original, place
        kind = _derived(class_of(original), self, reader)
        self.made = _base_of(kind).__new__(kind)
        for name, value in state_of(original).items():
            if name in OF_TORCH and isinstance(value, (dict, set)):
                value = copy.copy(value)
            object.__setattr__(self.made, name, value)
        self._of_class = set(vars(kind))
        self.note_state()

    @property
    def held(self) -> dict[str, Any]:
        """The attributes of the copy that are in a dictionary."""
        held: dict[str, Any] = object.__getattribute__(self.made, "__dict__")
        return held

    @property
    def classes(self) -> list[tuple[Place, type]]:
        """The classes of the object, in the order of resolution, with their places."""
        kinds = class_of(self.original).__mro__
        return [(self.place.at(("class", i)), kind) for i, kind in enumerate(kinds)]

    def note_state(self) -> None:
        """Let :meth:`changes` compare with the state that the copy has now."""
        self._before = {name: _items(value) for name, value in state_of(self.made).items()}

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the names of attributes with other values than noted, and both values."""
        now = {name: _items(value) for name, value in state_of(self.made).items()}
        for name in dict.fromkeys((*self._before, *now)):
            one, other = self._before.get(name, MISSING), now.get(name, MISSING)
            if name != "training" and not _is_same(one, other):
                yield name, one, other
        for name in vars(type(self.made)).keys() - self._of_class:
            yield name, MISSING, None


def can_have_twin(x: Any) -> bool:
    """Return True if the state of ``x`` is in attributes."""
    if isinstance(x, (Tensor, nn.Module, type)):
        return False
    return _base_of(type(x)) in (object, SimpleNamespace) and type(x) is not object


def state_of(x: Any) -> dict[str, Any]:
    """Return the attributes that an object itself holds."""
    try:
        state = dict(object.__getattribute__(x, "__dict__"))
    except AttributeError:
        state = {}
    for kind in (kind for kind in type(x).__mro__ if kind.__flags__ & _HEAP_TYPE):
        for name, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType):
                try:
                    state[name] = slot.__get__(x)
                except AttributeError:  # it is empty
                    continue
    return state


def _base_of(kind: type) -> type:
    """Return the first class of ``kind`` that is not written in Python."""
    return next(x for x in kind.__mro__ if not x.__flags__ & _HEAP_TYPE)


def _items(value: Any) -> Any:
    """Return a copy of the items of a dictionary or set of torch's."""
    if isinstance(value, dict):
        return [*value.items()]
    return {*value} if isinstance(value, set) else value


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) in (*VALUES, set) and bool(one == other)


class _Silent:
    """Keeps classes from being told of classes that are derived from them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def _derived(own: type, twin: Twin, reader: Reader) -> type:
    """Derive a class whose only instance shows its attributes."""
    later = getattr(own, "__getattr__", None)

    def __getattribute__(self: Any, name: str) -> Any:
        value = own.__getattribute__(self, name)
        return reader.read(twin, name, value, sys._getframe(1).f_code)

    def __getattr__(self: Any, name: str) -> Any:
        code = sys._getframe(1).f_code
        try:
            if later is None:
                raise AttributeError(f"{own.__name__!r} object has no attribute {name!r}")
            value = later(self, name)
        except AttributeError:
            reader.missing(twin, name, code)
            raise
        return reader.read(twin, name, value, code)

    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    names |= {"__getattribute__": __getattribute__, "__getattr__": __getattr__}
    if hasattr(own, "__del__"):
        names["__del__"] = lambda self: None
    kind = type(own)
    # neither a metaclass of the user's nor its registries hear of it
    make = ABCMeta.__new__ if issubclass(kind, ABCMeta) else type.__new__
    made: type = make(kind, own.__name__, (_Silent, own), names)
    return made
