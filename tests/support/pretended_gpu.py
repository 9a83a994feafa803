"""A GPU, a CUDA and a Triton that are not there, for the choice of backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from blocktensor.ops import devices
from blocktensor.ops.gemm import choose_backend
from blocktensor.ops.grouped_gemm import choose_backend as grouped
from blocktensor.ops.runtime.specialize import GEMM_VARIABLE

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")

Pretend = Callable[..., None]


def _forget() -> None:
    choose_backend._choose.cache_clear()
    choose_backend.warn_slow.cache_clear()
    grouped._choose.cache_clear()


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretend]:
    """Make the registries see a GPU of some capability, a CUDA version, a Triton version or none.

    No backend is forced, and none was chosen before.
    """

    def install(
        capability: tuple[int, int], cuda: str | None = "13.0", triton: str | None = "3.9.0"
    ) -> None:
        monkeypatch.setattr(devices, "_capability", lambda index: capability)
        monkeypatch.setattr(devices, "has_triton", lambda: triton is not None)
        monkeypatch.setattr(choose_backend, "triton_version", lambda: triton)
        for module in (choose_backend, grouped):
            monkeypatch.setattr(module, "sms", lambda device: 132)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    monkeypatch.delenv(GEMM_VARIABLE, raising=False)
    _forget()
    yield install
    _forget()
