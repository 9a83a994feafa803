"""A module whose forward has a state that cannot be watched is left alone, and as it was."""

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
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from blocktensor import fuse
from tests.support.fused_kinds import why_left_alone
from tests.support.mlps import MLP, X, converted

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


class Hooked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        LIST.append(1)
        return grad


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


class Penalized(MLP):
    """Leaves an activation penalty in a list of its file."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        LIST.append(h.float().abs().mean())
        return self.down_proj(h)


class Caught(Penalized):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except Exception:
            return MLP.forward(self, x)


@pytest.mark.parametrize("make", [Penalized, Caught])
def test_a_penalty_outside_of_the_module_stays_in_the_loss(make: Callable[[], Any]) -> None:
    model = converted(make())
    assert why_left_alone(model) == f"its forward reads {__name__}.LIST, a list"
    y = model(X.bfloat16())
    (penalty,) = LIST
    LIST.clear()
    (y.float().square().mean() + 10 * penalty).backward()
    assert model.gate_proj.weight.grad.norm() > 0.1


def leaves_on_input(m: Any, x: Tensor) -> None:
    x.penalty = x.mean()  # type: ignore[attr-defined]


def leaves_on_weight(m: Any, x: Tensor) -> None:
    m.up_proj.weight.penalty = x.mean()


def nothing(m: Any, x: Tensor) -> None:
    pass


Does = Callable[[Any, Tensor], Any]
LEFT: dict[str, tuple[Does, Does, str]] = {
    "on its input": (leaves_on_input, nothing, "its forward changes penalty"),
    "on a weight": (leaves_on_weight, nothing, "its forward changes penalty"),
    "in its input": (
        nothing,
        lambda m, x: x.data.mul_(2),
        "differs in what it writes to its input",
    ),
    "in a weight": (
        lambda m, x: m.up_proj.weight.detach().clamp_(-0.1, 0.1),
        nothing,
        "its forward changes up_proj.weight",
    ),
    "in a weight, uncounted": (
        lambda m, x: m.up_proj.weight.data.mul_(0.5),
        nothing,
        "its forward changes up_proj.weight",
    ),
    "in a buffer of a linear layer": (
        lambda m, x: m.up_proj.calls.add_(1),
        nothing,
        "its forward reads up_proj.calls, a Tensor",
    ),
}
"""What a forward does before and after it computes, and the reason why it is left alone."""


@pytest.mark.parametrize("name", LEFT)
def test_what_a_forward_leaves_on_tensors(name: str) -> None:
    before, after, reason = LEFT[name]

    class Leaving(MLP):
        def forward(self, x: Tensor) -> Tensor:
            before(self, x)
            y = super().forward(x)
            after(self, x)
            return y

    model = Leaving()
    model.up_proj.register_buffer("calls", torch.zeros(()))
    assert why_left_alone(converted(model)) == reason


class ByTorch(MLP):
    """Calls a function in a wrapper of torch."""

    @torch.compiler.disable
    def track(self) -> None:
        LIST.append(1)

    def forward(self, x: Tensor) -> Tensor:
        self.track()
        return super().forward(x)


class Callable_:
    """A forward that is no function."""

    def __get__(self, m: Any, kind: Any) -> Any:
        return functools.partial(self, m)

    def __call__(self, m: Any, x: Tensor) -> Tensor:
        LIST.append(1)
        return MLP.forward(m, x)


def test_a_forward_that_is_no_function() -> None:
    model = converted(type("Other", (MLP,), {"forward": Callable_()})())
    assert why_left_alone(model) == "its forward is no function"


class Hooking(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        if h.requires_grad:
            h.register_hook(lambda grad: None)
        return self.down_proj(h)


class OfGradients(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return Hooked.apply(super().forward(x))


class WithoutGradients(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if torch.is_grad_enabled() else 2)


class OfTable(MLP):
    """Has functions of which one is called by a name in a table."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * Counter(a=1)["a"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Hooking, "its forward uses register_hook"),
        (ByTorch, f"its forward reads {__name__}.LIST, a list"),
        (OfGradients, f"its forward reads {__name__}.LIST, a list"),
        (WithoutGradients, "differs in its output without gradients"),
    ],
)
def test_what_shows_in_backward_or_without_it(make: Callable[[], Any], reason: str) -> None:
    assert why_left_alone(converted(make())) == reason


def test_constants_that_are_made_in_a_forward_are_no_state() -> None:
    assert fuse(converted(OfTable())).left_alone == ()
