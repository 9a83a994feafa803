"""Variants that are measured in processes of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import pytest

from benchmarks import turns
from tests.support.ranks import forking

MILLISECONDS = {"bf16": 4.0, "fp8": 2.0}


def waits(name: str) -> Mapping[str, Callable[[], object]]:
    if name == "broken":
        raise ValueError("no such model")
    if name == "killed":
        os._exit(1)
    modes = ("eager",) if name == "bf16" else ("eager", "compiled")
    return {mode: lambda: time.sleep(MILLISECONDS[name] / 1000) for mode in modes}


def clock(call: Callable[[], object], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count * 1000


def process_id(call: Callable[[], object]) -> int:
    return os.getpid()


@pytest.fixture(autouse=True)
def prepared_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start with torch imported."""
    context = forking()
    monkeypatch.setattr(turns.multiprocessing, "get_context", lambda method: context)


def test_each_variant_has_a_process_and_all_of_its_modes() -> None:
    ms, peaks = turns.measured_in_turns(["bf16", "fp8"], waits, 4, 8.0, clock, process_id)
    assert [*ms] == [*peaks] == ["bf16/eager", "fp8/eager", "fp8/compiled"]
    assert 4 <= ms["bf16/eager"] < 40
    assert 2 <= ms["fp8/compiled"] < 20
    assert peaks["fp8/eager"] == peaks["fp8/compiled"] != peaks["bf16/eager"]
    assert os.getpid() not in peaks.values()


def test_a_variant_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match="killed: its process has ended"):
        turns.measured_in_turns(["killed"], waits, 4, 8.0, clock, process_id)
    with pytest.raises(RuntimeError, match=r"broken:\n(.*\n)*ValueError: no such model"):
        turns.measured_in_turns(["broken"], waits, 4, 8.0, clock, process_id)
