"""Devices and installed software, as far as the choice of a backend depends on them."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util

import torch

_FP8_CAPABILITY = (8, 9)
HOPPER = (9, 0)
"""Compute capability with TMA and wgmma, and 16-bit maxima two at a time."""


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    index: int | None = device.index
    return _capability(torch.cuda.current_device() if index is None else index)


@functools.cache
def sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; those of an H200 for any other device (meta tensors)."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def triton_version() -> str:
    """Version of the installed Triton."""
    return importlib.metadata.version("triton")


@functools.cache
def has_triton() -> bool:
    """True if Triton can be imported."""
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # sys.modules["triton"] is None: its import is blocked
        return False


@functools.cache
def has_gluon() -> bool:
    """True if the installed Triton has Gluon."""
    return has_triton() and importlib.util.find_spec("triton.experimental.gluon") is not None


def lacks_fp8(device: torch.device) -> str | None:
    """The reason why a device has no FP8 arithmetic; None if it has."""
    if device.type != "cuda":
        return f"needs a CUDA device, got {device.type!r}"
    found = capability(device)
    if found < _FP8_CAPABILITY:
        return "needs a GPU with FP8 (sm_89 or later), got sm_{}{}".format(*found)
    return None


def lacks_triton(device: torch.device) -> str | None:
    """The reason why Triton kernels cannot run on a device; None if they can."""
    return lacks_fp8(device) or (None if has_triton() else "triton is not installed")
