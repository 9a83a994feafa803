"""Producers to compile for sm_90 without a GPU: backends, formats to try, allowed spills."""

from __future__ import annotations

import torch

from blocktensor.ops.cast.gluon_ahead import cast_ahead_kernel
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_1X128_POW2, BLOCKS_128X128, BlockFormat
from blocktensor.ops.producers.choose_backend import (
    PRODUCER_BACKENDS,
    ProducerProblem,
)
from blocktensor.ops.runtime.launch import Launch

from .casts import Functions, kernels
from .sm90 import TUNED

META = torch.device("meta")
Formats = tuple[BlockFormat | None, BlockFormat | None]
BOTH: Formats = BLOCKS_1X128, BLOCKS_1X128
MIXED: Formats = BLOCKS_1X128, BLOCKS_128X128
COLUMNWISE: Formats = None, BLOCKS_1X128
ROWWISE: Formats = BLOCKS_1X128, None
POW2: Formats = BLOCKS_1X128_POW2, BLOCKS_1X128_POW2


def kernels_for(name: str, sources: tuple[torch.Tensor, ...], formats: Formats) -> Functions:
    """The functions of the backend of this name, which must take the problem."""
    functions = kernels(name, PRODUCER_BACKENDS)
    assert functions.backend.declines(ProducerProblem(sources, *formats)) is None
    return functions


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
