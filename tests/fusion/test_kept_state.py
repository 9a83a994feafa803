"""Verification leaves the state of forwards as it was, and tells which forwards have any."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from blocktensor import fuse
from tests.support.mlps import MLP, X, converted, fused_in

SEEN: list[float] = []


class Amax(MLP):
    amax = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.amax = max(self.amax, x.detach().abs().max().item())
        return super().forward(x)

    def state(self) -> Any:
        return self.amax


class Latest(MLP):
    def forward(self, x: Tensor) -> Tensor:
        self.latest = x
        return super().forward(x)

    def state(self) -> Any:
        return "latest" in vars(self)


class Statistics:
    def __init__(self) -> None:
        self.tensor, self.by_name = torch.zeros(()), {"rows": [0]}
        self.last, self.kinds, self.calls = deque([0], 2), {0}, Counter[str]()


class Objects(MLP):
    """Changes one thing that an object of its refers to."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.statistics, self.which = (Statistics(),), which

    def forward(self, x: Tensor) -> Tensor:
        held = self.statistics[0]
        if self.which == "tensor":
            held.tensor += 1
        elif self.which == "by_name":
            held.by_name["rows"].append(len(x))
        elif self.which == "last":
            held.last.append(len(x))
        elif self.which == "kinds":
            held.kinds.add(len(held.kinds))
        else:
            held.calls["forward"] += 1
        return super().forward(x)

    def state(self) -> Any:
        held = vars(self.statistics[0]).values()
        return [x.item() if isinstance(x, Tensor) else repr(x) for x in held]


class Slots:
    __slots__ = ("calls", "later")

    def __init__(self) -> None:
        self.calls = [0]


class InSlots(MLP):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.counts, self.name = Slots(), name

    def forward(self, x: Tensor) -> Tensor:
        if self.name == "list":
            self.counts.calls.append(1)
        else:
            self.counts.later = len(x)
        return super().forward(x)

    def state(self) -> Any:
        return len(self.counts.calls), hasattr(self.counts, "later")


class InArray(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.counts = np.zeros((2, 3))[:, ::2]

    def forward(self, x: Tensor) -> Tensor:
        self.counts[1, 0] += 1
        return super().forward(x)

    def state(self) -> Any:
        return self.counts.tolist()


class Draws(MLP):
    """Numbers that it does not use, from generators of its own and of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3, generator=self.generator), random.random()
        return super().forward(x)

    def state(self) -> Any:
        return self.generator.get_state().tolist(), random.getstate()


class OfClass(MLP):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x)

    def state(self) -> Any:
        return OfClass.calls


class Global(MLP):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(1.0)
        return super().forward(x)

    def state(self) -> Any:
        return list(SEEN)


def of_closure() -> nn.Module:
    seen: list[int] = []

    class OfClosure(MLP):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(1)
            return super().forward(x)

        def state(self) -> Any:
            return list(seen)

    return OfClosure()


class Clamps(MLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up_proj.weight.clamp_(-0.1, 0.1)
        return super().forward(x)

    def state(self) -> Any:
        return self.up_proj.weight.detach().abs().max().item()


class CountsActivations(nn.SiLU):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class OfActivation(MLP):
    def __init__(self) -> None:
        super().__init__(act=CountsActivations())

    def state(self) -> Any:
        return self.act_fn.calls


MAKE: dict[str, Any] = {
    "amax": Amax,
    "latest": Latest,
    **{f"statistics {x}": (lambda x=x: Objects(x))
       for x in ("tensor", "by_name", "last", "kinds", "calls")},
    **{f"counts in {x}": (lambda x=x: InSlots(x)) for x in ("list", "slot")},
    "counts in an array": InArray,
    "generator": Draws,
    "calls of the class": OfClass,
    "SEEN": Global,
    "seen": of_closure,
    "weight": Clamps,
    "calls of its activation": OfActivation,
}  # fmt: skip


@pytest.mark.parametrize("name", MAKE)
def test_a_forward_with_state_is_left_alone_and_keeps_it(name: str) -> None:
    model: Any = converted(MAKE[name]())
    before, keys = model.state(), list(vars(model))
    (entry,) = fuse(model).entries
    assert entry.reason == f"its forward changes {name.split()[0]}"
    assert fused_in(model) == []
    assert model.state() == before
    assert list(vars(model)) == keys
    model(X.bfloat16())
    assert model.state() != before


def test_attributes_that_a_forward_reads_are_no_state() -> None:
    class Reads(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.table, self.parent = {"by": [1]}, torch.ones(3), [nn.Linear(2, 2)]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale["by"][0] * len([*SEEN[:0], 1]))

    model = converted(Reads())
    assert fuse(model).left_alone == ()
