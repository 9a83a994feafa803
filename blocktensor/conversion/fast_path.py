"""Report and warn about a GPU on which some of the fast kernels do not run."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class FastPath:
    """The fast path of a GPU with FP8: what it lacks, asked once.

    GPUs other than Hopper lack all GEMMs: the portable kernels run there.

    Attributes:
        gpu: the device.
        lacks: the families of ops without their fast kernels, each with the reason.
    """

    gpu: torch.device
    lacks: Mapping[str, str]

    @classmethod
    def of(cls, gpu: torch.device) -> FastPath:
        """Return the fast path of a GPU."""
        reasons = {family: backends[0].unusable(gpu) for family, backends in FAMILIES.items()}
        return cls(gpu, {family: reason for family, reason in reasons.items() if reason})

    def is_portable(self, stack: bool) -> bool:
        """Return True if matmuls with a weight or a ``stack`` have only portable kernels."""
        return ("grouped GEMMs" if stack else "GEMMs") in self.lacks

    def __str__(self) -> str:
        """Return one line for a report: "fast path: yes", or no and why."""
        return f"fast path: no ({self._missing()})" if self.lacks else "fast path: yes"

    def warn_if_missing(self) -> None:
        """Warn once a process if a Hopper GPU lacks parts of it: which, and a remedy."""
        if self.lacks and capability(self.gpu) == HOPPER:
            _warn(torch.cuda.get_device_name(self.gpu), self._missing())

    def _missing(self) -> str:
        by_reason: dict[str, list[str]] = {}
        for family, reason in self.lacks.items():
            by_reason.setdefault(reason, []).append(family)
        return "; ".join(f"{', '.join(parts)}: {reason}" for reason, parts in by_reason.items())


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


def fast_paths(devices: Iterable[torch.device]) -> dict[torch.device, FastPath]:
    """Return the fast path of the GPU that a model on each device runs on, if there is one."""
    paths: dict[torch.device, FastPath] = {}
    for device in devices:
        if device not in paths and (gpu := gpu_of(device)) is not None:
            paths[device] = FastPath.of(gpu)
    return paths


@functools.cache
def _warn(gpu: str, missing: str) -> None:
    warnings.warn(
        f"blocktensor: the fast path is missing on this {gpu} ({missing}): slower kernels run, and "
        f"convert leaves alone what they do not speed up. {VERSIONS}; `python -m blocktensor` "
        f"shows what runs",
        stacklevel=4,
    )
