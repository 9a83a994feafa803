"""The choice of the first backend that takes a problem, what it asks of devices, and why."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blocktensor.ops import devices, reference
from blocktensor.ops.registry import Backend, Choice, first_choice, last_line

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def says(reason: str | None) -> Callable[[Any], str | None]:
    return lambda _: reason


def backend(name: str, **reasons: str) -> Backend[int]:
    """A backend that gives these reasons, if any, whatever it is asked about."""
    return Backend(name, (), **{what: says(why) for what, why in reasons.items()})


LAST = Backend("last", (), why=lambda problem: f"takes {problem} too")


def unasked(_: object) -> str | None:
    raise AssertionError("asked for nothing")


def test_the_first_that_takes_a_problem_is_chosen() -> None:
    first, later = backend("first"), Backend("later", (), unasked, unasked, unasked, unasked)
    choice = first_choice((first, later), 3, CPU)
    assert choice == Choice(first, "takes this problem")
    assert (choice.name, choice.reason, choice.others) == ("first", "takes this problem", "")


@pytest.mark.parametrize("what", ["unusable", "declines", "yields"])
def test_one_that_objects_is_passed_over(what: str) -> None:
    choice = first_choice((backend("first", **{what: "is busy"}), LAST), 3, CPU)
    assert (choice.name, choice.why, choice.others) == ("last", "takes 3 too", "first: is busy")
    assert choice.reason == "takes 3 too; first: is busy"


def test_the_first_objection_counts() -> None:
    """A backend may assume a device that it can use, and, to yield, a problem that it can run."""
    absent = Backend("absent", (), says("not here"), unasked, unasked, unasked)
    unable = Backend("unable", (), says(None), says("too large"), unasked, unasked)
    choice = first_choice((absent, unable, LAST), 3, CPU)
    assert choice.others == "absent: not here; unable: too large"


def test_backends_with_one_reason_share_it() -> None:
    reasons = {"a": "no GPU", "b": "too large", "c": "no GPU", "d": "no GPU"}
    backends = [backend(name, unusable=reason) for name, reason in reasons.items()]
    choice = first_choice((*backends, LAST), 3, CPU)
    assert choice.others == "a, c, d: no GPU; b: too large"


def test_backends_are_told_the_device_and_the_problem() -> None:
    def on_the_cpu(device: torch.device) -> str | None:
        return None if device == CPU else f"not on {device}"

    def small(problem: int) -> str | None:
        return None if problem < 10 else f"{problem} is too large"

    picky = Backend("picky", (), on_the_cpu, small, why=lambda problem: f"likes {problem}")
    assert first_choice((picky, LAST), 3, CPU).reason == "likes 3"
    assert first_choice((picky, LAST), 30, CPU).others == "picky: 30 is too large"
    assert first_choice((picky, LAST), 3, torch.device("meta")).others == "picky: not on meta"


def wrapped(root: Exception) -> Exception:
    """As Triton wraps an error, once for every function that it was compiling."""
    error = RuntimeError("at 3:8:\n    x = double(x)\n        ^")
    error.__cause__ = root
    return error


def test_a_function_is_that_of_the_first_module_that_has_one() -> None:
    made: Backend[int] = Backend("plain", (SimpleNamespace(largest=max), "reference"))
    largest, transpose = made.function("largest"), made.function("transpose")
    assert largest is not None
    assert largest(3, 4) == 4
    assert transpose is reference.transpose
    assert made.function("triple") is None
    with pytest.raises(ModuleNotFoundError):
        Backend[int]("absent", ("no_such_module",)).function("double")


def test_the_last_line_of_the_first_error() -> None:
    assert last_line(wrapped(ValueError("no such\ninstruction"))) == "instruction"
    assert last_line(wrapped(ValueError())) == "ValueError"


@pytest.fixture
def installed() -> Iterator[None]:
    """Look at the installed software anew, before and after."""
    questions = devices.has_triton, devices.gluon_is_off
    for question in questions:
        question.cache_clear()
    yield
    for question in questions:
        question.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """Capabilities by the index of a device; the current one is 1."""
    known = {0: (9, 0), 1: (8, 0)}
    monkeypatch.setattr(devices, "_capability", lambda index: known[index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return known


@pytest.mark.usefixtures("gpu")
def test_a_device_without_an_index_is_the_current_one() -> None:
    assert devices.capability(CUDA) == (9, 0)
    assert devices.capability(torch.device("cuda")) == (8, 0)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 1)])
def test_fp8(gpu: dict[int, tuple[int, int]], capability: tuple[int, int]) -> None:
    gpu[0] = capability
    too_old = "needs a GPU with FP8 (sm_89 or later), got sm_80"
    assert devices.lacks_fp8(CUDA) == (too_old if capability == (8, 0) else None)


@pytest.mark.usefixtures("gpu")
def test_what_triton_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.lacks_triton(CPU) == "needs a CUDA device, got 'cpu'"
    monkeypatch.setattr(devices, "has_triton", lambda: True)
    assert devices.lacks_triton(CUDA) is None
    monkeypatch.setattr(devices, "has_triton", lambda: False)
    assert devices.lacks_triton(CUDA) == "triton is not installed"
    old = torch.device("cuda", 1)
    assert devices.lacks_triton(old) == devices.lacks_fp8(old)


@pytest.mark.usefixtures("installed")
def test_an_import_of_triton_may_be_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not devices.has_triton()


@pytest.mark.usefixtures("installed", "gpu")
def test_the_fast_path_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_triton", lambda: True)
    monkeypatch.setenv("BLOCKTENSOR_FAST_PATH", "0")
    assert devices.lacks_gluon(CUDA) == "switched off by BLOCKTENSOR_FAST_PATH=0"
    devices.gluon_is_off.cache_clear()
    monkeypatch.setenv("BLOCKTENSOR_FAST_PATH", "1")
    found = importlib.util.find_spec("triton")
    assert devices.lacks_gluon(CUDA) == (None if found else "this Triton has no Gluon")


def test_meta_tensors_are_planned_for_an_h200() -> None:
    assert devices.sms(torch.device("meta")) == 132
