"""List the versions of Triton that Gluon kernels were tested with, and try other versions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...formats import Quantized
from ...registry import last_line
from ..launch import not_recorded

TESTED = ("3.6", "3.7", "3.8", "3.9")
"""Versions that need no trial: ``pytest -m gpu`` ran with them (README.md)."""

Trial = Callable[[torch.device], str | None]


TOLERANCE = 4e-3
"""Largest relative error of a bf16 matmul: fp32 sums in another order."""


def installed() -> str:
    """Return the version of the installed Triton."""
    import triton

    version: str = triton.__version__
    return version


def is_tested() -> bool:
    """Return whether the installed Triton is one of :data:`TESTED`."""
    return ".".join(installed().split(".")[:2]) in TESTED


def tried(trial: Trial) -> Trial:
    """Decorate a trial of kernels: return why they fail with an untested Triton; None if they work.

    Args:
        trial: runs a small problem of the kernels on a device, and returns how the result is wrong,
            or None. An exception counts as failure. It imports the kernels itself, since they may
            need a name that this Triton lacks. It runs once for each device, and not while a CUDA
            graph is captured.
    """

    @functools.cache
    def failure(device: torch.device) -> str | None:
        try:
            with torch.no_grad(), not_recorded(), _disable_current_modes(), torch.device("cpu"):
                found = trial(device)
        except torch.cuda.OutOfMemoryError:
            raise  # the caller lacks memory; not a fault of the kernels
        except Exception as error:  # any error of the compiler or driver: do not use the kernels
            found = last_line(error)
        if found is None:
            return None
        tested = ", ".join(TESTED)
        return f"Triton {installed()} is not among those tested ({tested}): {found}"

    def failure_unless_tested(device: torch.device) -> str | None:
        if is_tested() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None
        return failure(device)

    failure_unless_tested.forget = failure.cache_clear  # type: ignore[attr-defined]
    return failure_unless_tested


def on(device: torch.device, x: Quantized) -> Quantized:
    """Copy a cast to a device."""
    return Quantized(x.data.to(device), x.scale.to(device), x.format)


def differ(made: Tensor, wanted: Tensor) -> bool:
    """Return True if a result is NaN or its error is larger than :data:`TOLERANCE`."""
    error = (made.cpu().float() - wanted.float()).norm() / wanted.float().norm()
    return not error.item() <= TOLERANCE
