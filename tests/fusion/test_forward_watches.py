"""A fused module runs as written once anything has changed that its forward reads in any way."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktensor import fuse
from tests.support.compiling import afresh
from tests.support.fused_kinds import count_runs
from tests.support.gated import assert_bits
from tests.support.mlps import MLP, X, converted, results

__all__ = ["afresh"]

HERE = sys.modules[__name__]


class Other:
    """An object that a module holds."""

    factor = 1.0

    def method(self) -> float:
        return self.factor

    @property
    def computed(self) -> float:
        return self.factor


class LooksUp:
    def __getattr__(self, name: str) -> float:
        if name != "factor":
            raise AttributeError(name)
        return SETTINGS.FACTOR


class Derived(Other):
    def method(self) -> float:
        return super().method()


@dataclass(slots=True)
class Slotted:
    factor: float = 1.0


class Kind(Enum):
    ONE = 1.0
    TWO = 2.0


Pair = namedtuple("Pair", ("a", "b"))


class Held(MLP):
    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(inner=SimpleNamespace(scale=1.0))
        self.other, self.derived, self.slotted = Other(), Derived(), Slotted()
        self.looks_up = LooksUp()
        self.kind, self.pair, self.name = Kind.ONE, Pair(1.0, 2.0), "factor"


def reading(factor: Callable[[Any], Any]) -> Any:
    """A model that multiplies by ``factor(model)``."""

    class Reading(Held):
        read = staticmethod(factor)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.read(self)

    return converted(Reading())


def caught(m: Any) -> float:
    try:
        return m.factor
    except AttributeError:
        return 1.0


def inside(m: Any) -> float:
    def read() -> float:
        return getattr(m, "factor", 1.0)

    return next(x * read() for x in (1.0,))


def by_helper(x: Any) -> float:
    return getattr(x, "factor", 1.0)


def of_any(x: Any) -> float:
    return x.FACTOR


def closed(factor: float) -> Callable[[Any], float]:
    return lambda m: factor


def with_default(m: Any, factor: float = 1.0) -> float:
    return factor


def with_keyword(m: Any, *, factor: float = 1.0) -> float:
    return factor


def with_attribute(m: Any) -> float:
    return with_attribute.factor  # type: ignore[attr-defined]


with_attribute.factor = 1.0  # type: ignore[attr-defined]
CLOSED = closed(1.0)
PARTIAL = functools.partial(with_keyword, factor=1.0)
OBJECT = SimpleNamespace(factor=1.0, seen=[])
FACTOR = 1.0
SETTINGS = types.ModuleType("settings_of_these_tests")
SETTINGS.FACTOR = 1.0  # type: ignore[attr-defined]


class OfFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * FACTOR


Patch = pytest.MonkeyPatch


def sets(path: str, value: Any = 2.0) -> Callable[[Patch, Any], None]:
    """Return a change of an attribute that may be missing, below a module."""
    *owners, name = path.split(".")
    return lambda patch, m: patch.setattr(
        functools.reduce(getattr, owners, m), name, value, raising=False
    )


def sets_of(owner: Any, name: str, value: Any = 2.0) -> Callable[[Patch, Any], None]:
    """Return a change of an attribute that may be missing, of anything."""
    return lambda patch, m: patch.setattr(owner, name, value, raising=False)


READS: dict[str, tuple[Callable[[Any], Any], Callable[[Patch, Any], None]]] = {
    "getattr": (lambda m: getattr(m, "factor", 1.0), sets("factor")),
    "getattr of a file": (
        lambda m: getattr(SETTINGS, "LATER", 1.0),
        sets_of(SETTINGS, "LATER"),
    ),
    "getattr of a class": (lambda m: getattr(Other, "later", 1.0), sets_of(Other, "later")),
    "an object of the file": (lambda m: OBJECT.factor, sets_of(OBJECT, "factor")),
    "getattr of a setting": (
        lambda m: getattr(m.config.inner, "factor", 1.0),
        sets("config.inner.factor"),
    ),
    "getattr of a linear": (lambda m: getattr(m.up_proj, "factor", 1.0), sets("up_proj.factor")),
    "getattr in a helper": (by_helper, sets("factor")),
    "getattr in code inside of code": (inside, sets("factor")),
    "hasattr": (lambda m: 2.0 if hasattr(m, "factor") else 1.0, sets("factor")),
    "a caught error": (caught, sets("factor")),
    "a setting of a setting": (lambda m: m.config.inner.scale, sets("config.inner.scale")),
    "a replaced setting": (
        lambda m: m.config.inner.scale,
        sets("config.inner", SimpleNamespace(scale=2.0)),
    ),
    "a slot": (lambda m: m.slotted.factor, sets("slotted.factor")),
    "a member of an enumeration": (lambda m: m.kind.value, sets("kind", Kind.TWO)),
    "a named tuple": (lambda m: m.pair.a, sets("pair", Pair(2.0, 1.0))),
    "by a method of another object": (lambda m: m.other.method(), sets("other.factor")),
    "by a property of another object": (lambda m: m.other.computed, sets("other.factor")),
    "a method of another class": (
        lambda m: m.other.method(),
        sets_of(Other, "method", lambda self: 2.0),
    ),
    "a method by super()": (
        lambda m: m.derived.method(),
        sets_of(Other, "method", lambda self: 2.0),
    ),
    "a property of another class": (
        lambda m: m.other.computed,
        sets_of(Other, "computed", property(lambda self: 2.0)),
    ),
    "of the class, by type()": (lambda m: type(m).of_class, sets_of(Held, "of_class")),
    "of the class, by __class__": (lambda m: m.__class__.of_class, sets_of(Held, "of_class")),
    "of the class, by its name": (lambda m: Held.of_class, sets_of(Held, "of_class")),
    "of a file": (lambda m: SETTINGS.FACTOR, sets_of(SETTINGS, "FACTOR")),
    "of a file, in a helper": (lambda m: of_any(SETTINGS), sets_of(SETTINGS, "FACTOR")),
    "what an object looks up": (lambda m: m.looks_up.factor, sets_of(SETTINGS, "FACTOR")),
    "a variable in a closure": (
        CLOSED,
        sets_of(CLOSED.__closure__[0], "cell_contents"),  # type: ignore[index]
    ),
    "a default": (with_default, sets_of(with_default, "__defaults__", (2.0,))),
    "a default of a keyword": (
        with_keyword,
        sets_of(with_keyword, "__kwdefaults__", {"factor": 2.0}),
    ),
    "an attribute of a function": (with_attribute, sets_of(with_attribute, "factor")),
    "an argument of a partial function": (
        PARTIAL,
        lambda patch, m: patch.setitem(PARTIAL.keywords, "factor", 2.0),
    ),
    "a variable with the name of a builtin": (
        lambda m: abs(1.0),
        sets_of(HERE, "abs", lambda x: 2.0),
    ),
}
"""By name: the factor that a forward reads, and a change of it."""


def runs_fused(model: nn.Module) -> bool:
    return count_runs(model, X.bfloat16()) > 0


@pytest.fixture(autouse=True)
def settings(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, SETTINGS.__name__, SETTINGS)


@pytest.mark.parametrize("name", READS)
def test_what_is_watched(name: str, monkeypatch: Patch) -> None:
    factor, change = READS[name]
    model = reading(factor)
    twin, before = copy.deepcopy(model), results(model)
    assert fuse(model).left_alone == ()
    models = model, copy.deepcopy(model)
    with monkeypatch.context() as patch:
        for each in (*models, twin):
            change(patch, each)
        wanted = results(twin)
        assert not torch.equal(wanted[0], before[0])
        for each in models:
            assert_bits(results(each), wanted)
            assert not runs_fused(each)
    for each in models:
        assert_bits(results(each), before)
        assert runs_fused(each)


IN_GRAPHS = ["getattr", "a setting of a setting", "a slot", "a default", "a caught error"]


@pytest.mark.parametrize("name", IN_GRAPHS)
def test_compiled_forwards_see_it(name: str, monkeypatch: Patch) -> None:
    factor, change = READS[name]
    model, graphs = reading(factor), []
    twin, x = copy.deepcopy(model), X.bfloat16()

    def backend(graph: Any, example: Any) -> Any:
        graphs.append("_gated_mlp_whole" in str(graph.graph))
        return graph

    fuse(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        before = compiled(x)
        with monkeypatch.context() as patch:
            for each in (model, twin):
                change(patch, each)
            assert torch.equal(compiled(x), twin(x))
        assert torch.equal(compiled(x), before)
    assert graphs == [True, False]


def test_what_the_backward_of_a_function_reads(monkeypatch: Patch) -> None:
    class OfBackward(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return OfFunction.apply(super().forward(x))

    model = converted(OfBackward())
    twin = copy.deepcopy(model)
    assert fuse(model).left_alone == ()
    monkeypatch.setattr(HERE, "FACTOR", 2.0)
    assert_bits(results(model), results(twin))
    assert not runs_fused(model)


def test_what_lines_read_that_did_not_run() -> None:
    class Long(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * self.factor if len(x) > 100 else y

    model = converted(Long())
    assert fuse(model).left_alone == ()
    model.factor = 2.0
    assert not runs_fused(model)


def test_a_bias_that_is_added_later() -> None:
    class WithoutBias(MLP):
        def forward(self, x: Tensor) -> Tensor:
            h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
            return F.linear(h, self.down_proj.weight)

    model = converted(WithoutBias())
    twin = copy.deepcopy(model)
    assert fuse(model).left_alone == ()
    for each in (model, twin):
        each.down_proj.bias = nn.Parameter(torch.ones(192, dtype=torch.bfloat16))
    assert_bits(results(model), results(twin))


def test_functions_of_one_factory_are_told_apart(monkeypatch: Patch) -> None:
    first, second = closed(1.0), closed(1.0)
    model = reading(lambda m: first(m) * second(m))
    twin = copy.deepcopy(model)
    assert fuse(model).left_alone == ()
    for function in (first, second):
        with monkeypatch.context() as patch:
            patch.setattr(function.__closure__[0], "cell_contents", 2.0)
            assert_bits(results(model), results(twin))
            assert not runs_fused(model)


class ByTorch(MLP):
    """Has a forward, and one that it calls, in wrappers of torch."""

    factor = 1.0

    @torch.compiler.disable
    def scale(self, x: Tensor) -> Tensor:
        return x * self.factor

    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        return self.scale(super().forward(x))


def test_wrappers_of_torch() -> None:
    model = converted(ByTorch())
    twin = copy.deepcopy(model)
    assert fuse(model).left_alone == ()
    assert runs_fused(model)
    for each in (model, twin):
        each.factor = 2.0
    assert_bits(results(model), results(twin))
    assert not runs_fused(model)
