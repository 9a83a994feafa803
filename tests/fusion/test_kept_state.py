"""Verification leaves the state of forwards as it was, and tells which forwards have any."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from blocktensor import fuse
from tests.support.mlps import MLP, X, converted, fused_in

SEEN: list[float] = []


class Tried(MLP):
    """Changes something in every forward."""

    amax, calls = 0.0, 0

    def __init__(self, held: Any, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.held, self.change = held, change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return super().forward(x)


class Slots:
    __slots__ = ("calls", "later")

    def __init__(self) -> None:
        self.calls = [0]


def of_closure() -> Callable[[Any, Tensor], Any]:
    seen: list[int] = []
    return lambda m, x: seen.append(1)


class Case(NamedTuple):
    """What an MLP holds, how its forward changes that, what tells, and the name in the reason."""

    change: Callable[[Any, Tensor], Any]
    state: Callable[[Any], Any]
    held: Callable[[], Any] = lambda: None
    name: str = "held"


def shown(m: Any) -> str:
    return repr(m.held)


CASES = {
    "an attribute": Case(
        lambda m, x: setattr(m, "amax", max(m.amax, x.detach().abs().max().item())),
        lambda m: m.amax, name="amax"),
    "a new attribute": Case(
        lambda m, x: setattr(m, "latest", x), lambda m: "latest" in vars(m), name="latest"),
    "a tensor of an object": Case(
        lambda m, x: m.held[0].sum.add_(1), shown, lambda: (SimpleNamespace(sum=torch.zeros(())),)),
    "a list in a dictionary": Case(
        lambda m, x: m.held["rows"].append(len(x)), shown, lambda: {"rows": [0]}),
    "a deque": Case(lambda m, x: m.held.append(len(x)), shown, lambda: deque([0], 2)),
    "a set": Case(lambda m, x: m.held.add(len(m.held)), shown, lambda: {0}),
    "a counter": Case(lambda m, x: m.held.update(["forward"]), shown, Counter[str]),
    "a list in a slot": Case(lambda m, x: m.held.calls.append(1), lambda m: [*m.held.calls], Slots),
    "a new slot": Case(
        lambda m, x: setattr(m.held, "later", len(x)), lambda m: hasattr(m.held, "later"), Slots),
    "an array": Case(
        lambda m, x: np.add(m.held, 1, out=m.held), shown, lambda: np.zeros((2, 3))[:, ::2]),
    "generators": Case(  # its own and Python's
        lambda m, x: (torch.rand(3, generator=m.held), random.random()),
        lambda m: (m.held.get_state().tolist(), random.getstate()),
        lambda: torch.Generator().manual_seed(3)),
    "its class": Case(
        lambda m, x: setattr(type(m), "calls", type(m).calls + 1),
        lambda m: Tried.calls, name="calls"),
    "a global": Case(lambda m, x: SEEN.append(1.0), lambda m: [*SEEN], name="SEEN"),
    "a closure": Case(
        of_closure(), lambda m: [*m.change.__closure__[0].cell_contents], name="seen"),
    "a weight": Case(
        lambda m, x: m.up_proj.weight.detach().clamp_(-0.1, 0.1),
        lambda m: m.up_proj.weight.detach().abs().max().item(), name="weight"),
    "its activation": Case(
        lambda m, x: setattr(m.act_fn, "calls", 1 + vars(m.act_fn).get("calls", 0)),
        lambda m: vars(m.act_fn).get("calls"), name="calls"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_forward_with_state_is_left_alone_and_keeps_it(name: str) -> None:
    case = CASES[name]
    model: Any = converted(Tried(case.held(), case.change))
    before, keys = case.state(model), list(vars(model))
    (entry,) = fuse(model).entries
    assert entry.reason == f"its forward changes {case.name}"
    assert fused_in(model) == []
    assert case.state(model) == before
    assert list(vars(model)) == keys
    model(X.bfloat16())
    assert case.state(model) != before


def test_attributes_that_a_forward_reads_are_no_state() -> None:
    class Reads(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.table, self.parent = {"by": [1]}, torch.ones(3), [nn.Linear(2, 2)]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale["by"][0] * len([*SEEN[:0], 1]))

    assert fuse(converted(Reads())).left_alone == ()
