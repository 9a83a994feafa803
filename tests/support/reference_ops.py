"""Other functions in place of the reference's, for tests that watch or replace an op on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from blocktensor.autograd import plan
from blocktensor.ops import reference
from blocktensor.ops.op import OPS
from blocktensor.ops.registry import Backend


def decide_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty tables of decisions for this test, which the next test does not see."""
    for table in (*OPS.values(), plan._PLANS):
        monkeypatch.setattr(table, "_table", {})


def replace_op(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any]) -> None:
    """Run ``function`` where the backend "reference" would run its op of this name."""
    monkeypatch.setattr(reference, name, function)
    decide_anew(monkeypatch)


class Watched:
    """The only backend of an op's family: the reference, with a memory of what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ops: ModuleType, choose: str) -> None:
        self.problems: list[Any] = []
        self.given: list[tuple[Any, ...]] = []
        monkeypatch.setattr(ops, choose, self._choose)
        decide_anew(monkeypatch)

    def _choose(self, problem: Any) -> Any:
        self.problems.append(problem)
        return SimpleNamespace(backend=Backend("watched", (self,), launches=False))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.given.append(args)
            return getattr(reference, name)(*args)

        return run
