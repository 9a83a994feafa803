"""The Tritons that the kernels in Gluon were tested with, and their trial with another."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
from torch.utils._python_dispatch import _disable_current_modes

from ...registry import last_line
from ..launch import not_recorded

TESTED = ("3.6", "3.7", "3.8", "3.9")
"""Versions whose kernels are used without a trial: ``pytest -m gpu`` ran with them (README.md)."""

Trial = Callable[[torch.device], str | None]


def is_tested() -> bool:
    """Return whether the installed Triton is one of :data:`TESTED`."""
    return ".".join(triton.__version__.split(".")[:2]) in TESTED


def tried(trial: Trial) -> Trial:
    """Make a function that returns why kernels fail with an untested Triton, None if they do not.

    Args:
        trial: runs a small problem of the kernels on a device, and returns how the result is
            wrong, or None. What it raises is a failure too: it imports the kernels itself, since
            they may ask for a name that this Triton lacks. It runs once a device, and not while a
            CUDA graph is captured.
    """

    @functools.cache
    def failure(device: torch.device) -> str | None:
        try:
            with torch.no_grad(), not_recorded(), _disable_current_modes(), torch.device("cpu"):
                found = trial(device)
        except torch.cuda.OutOfMemoryError:
            raise  # of the caller's memory, not of the kernels
        except Exception as error:  # of the compiler or of the driver: the kernels are not used
            found = last_line(error)
        if found is None:
            return None
        tested = ", ".join(TESTED)
        return f"Triton {triton.__version__} is not among those tested ({tested}): {found}"

    def failure_unless_tested(device: torch.device) -> str | None:
        if is_tested() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None
        return failure(device)

    failure_unless_tested.forget = failure.cache_clear  # type: ignore[attr-defined]
    return failure_unless_tested
