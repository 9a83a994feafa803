"""Launches of producers, recorded and compiled for sm_90 without a GPU; formats to try."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from blocktensor.ops.cast.gluon_ahead import cast_ahead_kernel
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_1X128_POW2, BLOCKS_128X128, BlockFormat
from blocktensor.ops.producers.choose_backend import (
    PRODUCER_BACKENDS,
    ProducerKernels,
    ProducerProblem,
)
from blocktensor.ops.runtime.launch import Launch

from .sm90 import TUNED, compile_for_sm90

META = torch.device("meta")
Formats = tuple[BlockFormat | None, BlockFormat | None]
BOTH: Formats = BLOCKS_1X128, BLOCKS_1X128
MIXED: Formats = BLOCKS_1X128, BLOCKS_128X128
COLUMNWISE: Formats = None, BLOCKS_1X128
ROWWISE: Formats = BLOCKS_1X128, None
POW2: Formats = BLOCKS_1X128_POW2, BLOCKS_1X128_POW2


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches that were asked for; none runs."""
    found: list[Launch] = []
    monkeypatch.setattr(Launch, "__call__", lambda launch: found.append(launch))
    return found


def kernels_for(name: str, sources: tuple[torch.Tensor, ...], formats: Formats) -> ProducerKernels:
    """The functions of the backend of this name, which must take the problem."""
    backend = next(backend for backend in PRODUCER_BACKENDS if backend.name == name)
    assert backend.declines(ProducerProblem(sources, *formats)) is None
    return backend.load()


def allowed_spills(launch: Launch) -> int:
    """Bytes. Some programs spill a little: with more registers they are slower."""
    if not TUNED:  # the exact gelu takes 60 instructions an element
        return 640 if launch.constants["DETAIL"][0] == "gelu" else 256
    if launch.kernel is cast_ahead_kernel:
        if launch.constants["THIRD"]:
            return 120 if launch.constants["POWER_OF_TWO"] else 88
        if launch.constants["POWER_OF_TWO"]:
            return 88
        return 72 if launch.constants["DETAIL"][0] in ("gelu", "gelu_tanh") else 32
    if launch.constants["SOURCES"] == 3:
        return 128
    few = {64: 48, 72: 8}
    return few.get(launch.options.get("maxnreg", 0), 0) if launch.options["num_warps"] == 8 else 0


def compile_all(launches: list[Launch], run: Callable[[], object]) -> int:
    """How many launches ``run`` asks for; each compiles within its registers."""
    launches.clear()
    run()
    for made in launches:
        resources = compile_for_sm90(made)
        assert resources.spilled_bytes <= allowed_spills(made), f"{made.kernel} {made.constants}"
    return len(launches)
