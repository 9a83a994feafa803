"""The choice of the first backend that takes a problem, what it asks of devices, and why."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from blocktensor.ops import devices, reference
from blocktensor.ops.registry import Backend, Choice, first_choice, last_line

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def unasked(_: object) -> str | None:
    raise AssertionError("asked for nothing")


def test_the_first_that_takes_a_problem_is_chosen() -> None:
    first: Backend[int] = Backend("first", tuple)
    later = Backend("later", tuple, unasked, unasked, unasked, unasked)
    choice = first_choice((first, later), 3, CPU)
    assert choice == Choice(first, "takes this problem")
    assert (choice.name, choice.reason, choice.others) == ("first", "takes this problem", "")


def test_the_first_objection_counts() -> None:
    """A backend may assume a device that it can use, and, to yield, a problem that it can run."""
    absent = Backend("absent", tuple, lambda _: "not here", unasked, unasked, unasked)
    unable = Backend("unable", tuple, lambda _: None, lambda _: "too large", unasked, unasked)
    last = Backend("last", tuple, why=lambda problem: f"takes {problem} too")
    choice = first_choice((absent, unable, last), 3, CPU)
    assert (choice.name, choice.why) == ("last", "takes 3 too")
    assert choice.reason == "takes 3 too; absent: not here; unable: too large"


def wrapped(root: Exception) -> Exception:
    """As Triton wraps an error, once for every function that it was compiling."""
    error = RuntimeError("at 3:8:\n    x = double(x)\n        ^")
    error.__cause__ = root
    return error


def test_a_function_is_that_of_the_first_module_that_has_one() -> None:
    made: Backend[int] = Backend("plain", lambda: (SimpleNamespace(largest=max), reference))
    largest, transpose = made.function("largest"), made.function("transpose")
    assert largest is not None
    assert largest(3, 4) == 4
    assert transpose is reference.transpose
    assert made.function("triple") is None


def test_the_last_line_of_the_first_error() -> None:
    assert last_line(wrapped(wrapped(ValueError("no such\ninstruction")))) == "instruction"
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


@pytest.mark.parametrize("name", ["H100", "H200"])
def test_cards_are_known_by_their_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name=f"NVIDIA {name} PCIe", multi_processor_count=114)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert devices.card.__wrapped__(CUDA) == devices.Card(name, 114)
    assert devices.sms(torch.device("meta")) == 132  # an H200's
