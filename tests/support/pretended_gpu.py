"""A GPU, a CUDA and a Triton that are not there, for the choice of backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from blocktensor.ops import devices
from blocktensor.ops.gemm import choose_backend
from blocktensor.ops.runtime.specialize import GEMM_VARIABLE

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
