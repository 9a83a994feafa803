"""Backends for tests: watched or replaced ops on the CPU, and a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from blocktensor.autograd import plan
from blocktensor.autograd.repeat import REPEATED
from blocktensor.ops import devices, reference
from blocktensor.ops.gemm import choose_backend
from blocktensor.ops.op import OPS
from blocktensor.ops.registry import Backend
from blocktensor.ops.runtime.specialize import GEMM_VARIABLE, _PlainTable


def decide_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty tables of decisions for this test, which the next test does not see."""
    monkeypatch.setattr(plan._PLANS, "_found", {})
    for layer in REPEATED:
        monkeypatch.setattr(layer, "table", None)
    for table in OPS.values():
        monkeypatch.setattr(table, "_table", _PlainTable(table._first))


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
        return SimpleNamespace(backend=Backend("watched", lambda: (self,), launches=False))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.given.append(args)
            return getattr(reference, name)(*args)

        return run


CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")

Pretend = Callable[..., None]

OFF = "switched off by BLOCKTENSOR_FAST_PATH=0"
"""The reason that every kernel in Gluon gives where the fast path is off."""


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretend]:
    """Make the registries see a GPU of some capability, a CUDA version, a Triton or none.

    No backend is forced. Without ``fast``, the fast path is off, for the reason :data:`OFF`.
    """

    def install(
        capability: tuple[int, int],
        cuda: str | None = "13.0",
        triton: bool = True,
        fast: bool = True,
    ) -> None:
        monkeypatch.setattr(devices, "_capability", lambda index: capability)
        monkeypatch.setattr(devices, "has_triton", lambda: triton)
        monkeypatch.setattr(devices, "gluon_is_off", lambda: None if fast else OFF)
        h200 = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
        devices.card.cache_clear()
        monkeypatch.setattr(torch.version, "cuda", cuda)

    monkeypatch.delenv(GEMM_VARIABLE, raising=False)
    choose_backend.warn_slow.cache_clear()
    yield install
    choose_backend.warn_slow.cache_clear()
    devices.card.cache_clear()
