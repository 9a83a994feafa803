"""Devices and installed software, as far as the choice of a backend depends on them."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import NamedTuple

import torch

_FP8_CAPABILITY = (8, 9)
FAST_PATH_VARIABLE = "BLOCKTENSOR_FAST_PATH"
"""Environment variable: 0 keeps the kernels in Gluon from running. Read once."""

HOPPER = (9, 0)
"""Compute capability with TMA and wgmma, and 16-bit maxima two at a time."""


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    index: int | None = device.index
    return _capability(torch.cuda.current_device() if index is None else index)


class Card(NamedTuple):
    """A GPU as far as the choice of tiles depends on it.

    Attributes:
        name: a name in gemm/hopper/tiles.json: that of the card, or of the one it resembles most.
        sms: multiprocessors.
    """

    name: str
    sms: int


H200 = Card("H200", 132)
CARDS = {"H100": Card("H100", 132), "H200": H200}
"""The cards for which tiles are measured, by their names."""


@functools.cache
def card(device: torch.device) -> Card:
    """Return the card of a GPU; an H200 for any other device (meta tensors)."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    name = "H100" if "H100" in properties.name else H200.name
    return Card(name, properties.multi_processor_count)


def sms(device: torch.device) -> int:
    """Return multiprocessors of a GPU; those of an H200 for any other device."""
    return card(device).sms


@functools.cache
def has_triton() -> bool:
    """Return whether Triton can be imported."""
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # a module in its place has no __spec__
        return False


def lacks_fp8(device: torch.device) -> str | None:
    """Return the reason why a device has no FP8 arithmetic; None if it has."""
    if device.type != "cuda":
        return f"needs a CUDA device, got {device.type!r}"
    found = capability(device)
    if found < _FP8_CAPABILITY:
        return "needs a GPU with FP8 (sm_89 or later), got sm_{}{}".format(*found)
    return None


def lacks_triton(device: torch.device) -> str | None:
    """Return the reason why Triton kernels cannot run on a device; None if they can."""
    return lacks_fp8(device) or (None if has_triton() else "triton is not installed")


@functools.cache
def gluon_is_off() -> str | None:
    """Return the reason why no kernel in Gluon is to run; None if they may."""
    if os.environ.get(FAST_PATH_VARIABLE) == "0":
        return f"switched off by {FAST_PATH_VARIABLE}=0"
    if importlib.util.find_spec("triton.experimental.gluon") is None:
        return "this Triton has no Gluon"
    return None


def lacks_gluon(device: torch.device) -> str | None:
    """Return the reason why kernels in Gluon cannot run on a device; None if they may be tried."""
    return lacks_triton(device) or gluon_is_off()
