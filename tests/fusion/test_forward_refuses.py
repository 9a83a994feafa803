"""A module whose forward reads a state that cannot be watched is left alone, and as it was."""

from __future__ import annotations

import contextvars
import functools
import itertools
import logging
import operator
import os
import random
import sys
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.support.fused_kinds import why_left_alone
from tests.support.mlps import MLP, converted

HERE = sys.modules[__name__]
FACTOR = 1.0
SETTINGS = types.ModuleType("settings_of_these_tests")
LIST: list[Any] = []
TABLE: dict[str, Any] = {"factor": 1.0}
OBJECT = SimpleNamespace(factor=1.0, seen=[])
APPEND = LIST.append
NUMBERS = itertools.count()
REFERENCE = weakref.ref(MLP)
OF_THREAD, OF_CONTEXT = threading.local(), contextvars.ContextVar("of_context", default=1.0)
MODULE = nn.Linear(2, 2)
BUFFER = torch.ones(())
LOGGER = logging.getLogger(__name__)
COUNT = 0


@functools.lru_cache
def cached() -> float:
    return FACTOR


def appends(x: Any, held: list[Any] = []) -> None:  # noqa: B006
    held.append(x)


def counting() -> Callable[[Any], None]:
    count = 0

    def forward(m: Any) -> None:
        nonlocal count
        count += 1

    return forward


def closing(held: Any) -> Callable[[Any], None]:
    return lambda m: held.append(1)


def counts(m: Any) -> None:
    global COUNT
    COUNT += 1


def counts_in_class(m: Any) -> None:
    Tracker.count = 1


def counts_in_type(m: Any) -> None:
    type(m).count = 1


def counts_in_function(m: Any) -> None:
    counts.count = 1  # type: ignore[attr-defined]


def counts_in_file(m: Any) -> None:
    SETTINGS.COUNT = 1  # type: ignore[attr-defined]


class Tracker:
    seen: ClassVar[list[Any]] = []
    count = 0

    def track(self) -> None:
        self.seen.append(1)


class LooksUp:
    def __getattr__(self, name: str) -> float:
        if name != "factor":
            raise AttributeError(name)
        LIST.append(1)
        return 1.0


class Kinds(type):
    def __getattr__(cls, name: str) -> float:
        return FACTOR


class OfKinds(metaclass=Kinds):
    pass


LAZY = types.ModuleType("lazy_of_these_tests")
LAZY.__getattr__ = lambda name: FACTOR  # type: ignore[method-assign]


class Tracking(MLP):
    """Does something before it computes an MLP."""

    def __init__(self, does: Callable[[Any], Any]) -> None:
        super().__init__()
        self.does, self.held, self.tracker, self.buffer = does, [1.0], Tracker(), torch.ones(())
        self.reference, self.looks_up = (MODULE,), LooksUp()
        self.up_proj.weight.of_users = 1.0
        self.name = "tor"

    def forward(self, x: Tensor) -> Tensor:
        self.does(self)
        return super().forward(x)


def imports(m: Any) -> None:
    import colorsys  # noqa: F401


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a list of the file": (lambda m: LIST.append(1), "reads {file}.LIST, a list"),
    "a table of the file": (lambda m: TABLE["factor"], "reads {file}.TABLE, a dict"),
    "a module of the file": (lambda m: MODULE(BUFFER), "reads {file}.BUFFER, a Tensor"),
    "a bound method": (lambda m: APPEND(1), "reads {file}.APPEND, a builtin_function_or_method"),
    "a counter": (lambda m: next(NUMBERS), "reads {file}.NUMBERS, a count"),
    "a reference": (lambda m: REFERENCE().names, "reads {file}.REFERENCE, a ReferenceType"),
    "a thread's": (lambda m: OF_THREAD.factor, "reads {file}.OF_THREAD, a _local"),
    "a context's": (lambda m: OF_CONTEXT.get(), "reads {file}.OF_CONTEXT, a ContextVar"),
    "what is cached": (lambda m: cached(), "reads {file}.cached, a _lru_cache_wrapper"),
    "a list in a closure": (closing([]), "reads held, a list"),
    "a deque in a closure": (closing(deque()), "reads held, a deque"),
    "a list of another class": (
        lambda m: Tracker.seen.append(1),
        "reads {file}.Tracker.seen, a list",
    ),
    "a list of the class of an object": (lambda m: m.tracker.track(), "reads tracker.seen, a list"),
    "a list of a new object": (lambda m: Tracker().track(), "reads {file}.Tracker.seen, a list"),
    "a list that is a default": (appends, "reads a default of appends, a list"),
    "its list": (lambda m: m.held[0], "reads held, a list"),
    "its tensor": (lambda m: m.buffer * 2, "reads buffer, a Tensor"),
    "a module in its tuple": (lambda m: m.reference[0].bias, "reads reference, a tuple"),
    "its modules": (lambda m: list(m.children()), "uses children"),
    "its parameters": (lambda m: list(m.parameters()), "uses parameters"),
    "its dictionary": (lambda m: m.__dict__["held"], "uses __dict__"),
    "its dictionary by vars": (lambda m: vars(m)["held"], "uses vars"),
    "all variables": (lambda m: globals()["FACTOR"], "uses globals"),
    "getattr of a parameter": (
        lambda m: getattr(m.up_proj.weight, "later", 1.0),
        "reads an attribute of the parameter weight",
    ),
    "what an object looks up": (lambda m: m.looks_up.factor, "reads {file}.LIST, a list"),
    "what a new object looks up": (lambda m: LooksUp().factor, "reads {file}.LIST, a list"),
    "what a file looks up": (
        lambda m: LAZY.FACTOR,
        "reads {file}.LAZY, which looks up its attributes itself",
    ),
    "what a class looks up": (
        lambda m: OfKinds.factor,
        "reads {file}.OfKinds, which looks up its attributes itself",
    ),
    "an attrgetter": (operator.attrgetter("held"), "reads does, a attrgetter"),
    "getattr of a computed name": (
        lambda m: getattr(m, "fac" + m.name, 1.0),
        "uses getattr with a name or a default that is computed",
    ),
    "getattr by another name": (
        lambda m: map(getattr, (m,), ("factor",)),
        "uses getattr with a name or a default that is computed",
    ),
    "an attribute of a parameter": (
        lambda m: m.up_proj.weight.of_users,
        "reads an attribute of the parameter weight",
    ),
    "an import": (imports, "imports colorsys"),
    "the environment": (
        lambda m: os.environ.get("FACTOR"),
        "reads os.putenv, a builtin_function_or_method",
    ),
    "the time": (lambda m: time.time(), "reads time.time, a builtin_function_or_method"),
    "random numbers": (
        lambda m: random.random(),
        "reads random.random, a builtin_function_or_method",
    ),
    "random numbers of torch": (lambda m: torch.rand(()), "draws random numbers"),
    "a log": (lambda m: LOGGER.debug(1), "uses __traceback__"),
    "a print": (lambda m: print(end=""), "uses print"),
    "a count of the file": (counts, "changes COUNT"),
    "a count in a closure": (counting(), "changes count"),
    "a count of a class": (counts_in_class, "changes count"),
    "a count of its class": (counts_in_type, "changes count"),
    "a count of a function": (counts_in_function, "changes count"),
    "a count of another file": (counts_in_file, "changes COUNT"),
    "its count": (lambda m: setattr(m, "count", 1), "uses setattr"),
    "a count of its object": (lambda m: setattr(m.tracker, "count", 1), "uses setattr"),
    "a hook of a module": (
        lambda m: m.up_proj.register_forward_hook(lambda *_: None),
        "uses register_forward_hook",
    ),
}
"""What a forward does first, and the reason for which it is left alone."""


def shared() -> list[Any]:
    """All that these forwards could change."""
    held = LIST, TABLE, vars(OBJECT), Tracker.seen, Tracker.count, COUNT, appends.__defaults__
    names = [*vars(HERE), *vars(SETTINGS), *vars(Tracking), *vars(counts), *vars(Tracker)]
    return [repr(held), sorted(names), repr(NUMBERS)]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    does, reason = REFUSED[name]
    model = converted(Tracking(does))
    before, own = shared(), repr(vars(model))
    assert why_left_alone(model) == f"its forward {reason.format(file=__name__)}"
    assert shared() == before
    assert repr(vars(model)) == own
    assert type(model) is Tracking


@pytest.fixture(autouse=True)
def cleared() -> Iterator[None]:
    yield
    assert (LIST, OBJECT.seen, Tracker.seen) == ([], [], [])
