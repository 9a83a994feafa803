"""Report and warn about a GPU on which some of the fast kernels do not run."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ..ops.cast.choose_backend import CAST_BACKENDS
from ..ops.devices import HOPPER, capability, lacks_fp8
from ..ops.gemm.choose_backend import GEMM_BACKENDS
from ..ops.grouped_gemm.choose_backend import GROUPED_BACKENDS
from ..ops.registry import Backend

VERSIONS = "Triton 3.6 to 3.9, which torch 2.11 to 2.15 bring, has it"
"""The versions that have the fast path, for messages."""

FAMILIES: dict[str, Sequence[Backend[Any]]] = {
    "casts": CAST_BACKENDS,
    "GEMMs": GEMM_BACKENDS,
    "grouped GEMMs": GROUPED_BACKENDS,
}
"""The tables of backends by the names of their ops in reports."""


def gpu_of(device: torch.device) -> torch.device | None:
    """Return the GPU with FP8 that a model on ``device`` runs on, if it is known.

    A model on the CPU or meta device is assumed to run on the current GPU if this process uses CUDA
    already: a question must not initialize CUDA.
    """
    if device.type != "cuda":
        if not torch.cuda.is_initialized():
            return None
        device = torch.device("cuda", torch.cuda.current_device())
    return None if lacks_fp8(device) else device


def is_portable(device: torch.device, stack: bool) -> bool:
    """Return True if a GPU has only portable kernels for matmuls with a weight or a ``stack``."""
    return FAMILIES["grouped GEMMs" if stack else "GEMMs"][0].unusable(device) is not None


def _missing(device: torch.device) -> str:
    """Return the parts of the fast path that a GPU lacks, and why; "" if it lacks none.

    GPUs other than Hopper lack all GEMMs: the portable kernels run there.
    """
    by_reason: dict[str, list[str]] = {}
    for family, backends in FAMILIES.items():
        if reason := backends[0].unusable(device):
            by_reason.setdefault(reason, []).append(family)
    return "; ".join(f"{', '.join(parts)}: {reason}" for reason, parts in by_reason.items())


def described(device: torch.device) -> str:
    """Return one line for a report: "fast path: yes", or no and why."""
    missing = _missing(device)
    return f"fast path: no ({missing})" if missing else "fast path: yes"


def warn_if_missing(device: torch.device) -> None:
    """Warn once a process if a Hopper GPU lacks parts of the fast path: which, and a remedy."""
    if capability(device) == HOPPER and (missing := _missing(device)):
        _warn(torch.cuda.get_device_name(device), missing)


@functools.cache
def _warn(gpu: str, missing: str) -> None:
    warnings.warn(
        f"blocktensor: the fast path is missing on this {gpu} ({missing}): slower kernels run, and "
        f"convert leaves alone what they do not speed up. {VERSIONS}; `python -m blocktensor` "
        f"shows what runs",
        stacklevel=4,
    )
