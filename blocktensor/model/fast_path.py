"""Whether the fast kernels run on a GPU, and what is said where they do not."""

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

VERSIONS = "Triton 3.6 to 3.9, which torch 2.11 to 2.15 bring"
"""What has the fast path."""

_FAMILIES: dict[str, Sequence[Backend[Any, Any]]] = {
    "casts": CAST_BACKENDS,
    "GEMMs": GEMM_BACKENDS,
    "grouped GEMMs": GROUPED_BACKENDS,
}


def gpu_of(device: torch.device) -> torch.device | None:
    """The GPU that a model on ``device`` runs on: the current one, for a model on the CPU or meta.

    None where there is no GPU with FP8.
    """
    if device.type != "cuda":
        if not torch.cuda.is_available():
            return None
        device = torch.device("cuda", torch.cuda.current_device())
    return None if lacks_fp8(device) else device


def missing(device: torch.device) -> str | None:
    """What the fast path lacks on a GPU: families of kernels, and the reason; None if it is whole.

    On GPUs other than Hopper it lacks all GEMMs: the portable kernels run there.
    """
    by_reason: dict[str, list[str]] = {}
    for family, backends in _FAMILIES.items():
        if reason := backends[0].why_not(device):
            by_reason.setdefault(reason, []).append(family)
    if not by_reason and _launches_slowly():
        by_reason["this Triton launches kernels in an unknown way"] = ["repeated launches"]
    return "; ".join(f"{', '.join(f)}: {reason}" for reason, f in by_reason.items()) or None


def described(device: torch.device) -> str:
    """One line for a report: "fast path: yes", or no and why."""
    lacks = missing(device)
    return "fast path: yes" if lacks is None else f"fast path: no ({lacks})"


def only_portable(device: torch.device) -> bool:
    """True if neither linears nor experts have fast GEMMs on a GPU."""
    return GROUPED_BACKENDS[0].why_not(device) is not None


def warn_if_missing(device: torch.device) -> None:
    """Warn once a process if a Hopper GPU has no fast path: what is missing, its cost, a remedy."""
    if capability(device) == HOPPER and (lacks := missing(device)) is not None:
        _warn(torch.cuda.get_device_name(device), lacks)


@functools.cache
def _warn(gpu: str, lacks: str) -> None:
    warnings.warn(
        f"blocktensor: the fast path is missing on this {gpu} ({lacks}). Large linear layers run "
        f"at about 0.85 of its speed, eager steps of small ones at a third, experts slower than "
        f"bf16: convert leaves experts and small layers alone. {VERSIONS}, has it; `python -m "
        f"blocktensor` shows what runs",
        stacklevel=4,
    )


def _launches_slowly() -> bool:
    from ..ops.runtime.triton_compat.launcher import launcher  # needs Triton

    return launcher() is None
