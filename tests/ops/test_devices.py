"""What is asked of devices and of the installed software."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import pytest
import torch

from blocktensor.ops import devices

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def installed() -> Iterator[None]:
    """Look at the installed software anew, before and after."""
    tests = (devices.has_triton, devices.gluon_is_off)
    for test in tests:
        test.cache_clear()
    yield
    for test in tests:
        test.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """Capabilities by the index of a device; the current one is 1."""
    known = {0: (9, 0), 1: (8, 0)}
    monkeypatch.setattr(devices, "_capability", lambda index: known[index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return known


def test_a_device_without_an_index_is_the_current_one(gpu: dict[int, tuple[int, int]]) -> None:
    assert devices.capability(CUDA) == (9, 0)
    assert devices.capability(torch.device("cuda")) == (8, 0)


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((8, 0), "needs a GPU with FP8 (sm_89 or later), got sm_80"),
        ((8, 9), None),
        ((9, 0), None),
        ((12, 1), None),
    ],
)
def test_fp8(
    gpu: dict[int, tuple[int, int]], capability: tuple[int, int], reason: str | None
) -> None:
    gpu[0] = capability
    assert devices.lacks_fp8(CUDA) == reason


def test_what_triton_needs(
    gpu: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert devices.lacks_triton(CPU) == "needs a CUDA device, got 'cpu'"
    monkeypatch.setattr(devices, "has_triton", lambda: True)
    assert devices.lacks_triton(CUDA) is None
    monkeypatch.setattr(devices, "has_triton", lambda: False)
    assert devices.lacks_triton(CUDA) == "triton is not installed"
    assert devices.lacks_triton(torch.device("cuda", 1)) == devices.lacks_fp8(
        torch.device("cuda", 1)
    )


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
