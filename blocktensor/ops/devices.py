"""Inspect devices and installed software for the choice of backends."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import NamedTuple

import torch

_FP8_CAPABILITY = (8, 9)
FAST_PATH_VARIABLE = "BLOCKTENSOR_FAST_PATH"
"""Environment variable: with 0 no kernels in Gluon run. Read once."""

HOPPER = (9, 0)
"""The compute capability that has TMA, wgmma, and 16-bit maxima two at a time."""


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device."""
    index: int | None = device.index
    return _capability(torch.cuda.current_device() if index is None else index)


class Card(NamedTuple):
    """The facts of a GPU on which the choice of tiles depends.

    Attributes:
        name: the name in gemm/hopper/tiles.json of this card, or of the most similar one.
        sms: the number of multiprocessors.
    """

    name: str
    sms: int


H200 = Card("H200", 132)
CARDS = {"H100": Card("H100", 132), "H200": H200}
"""The cards with measured tiles, by their names."""


@functools.cache
def card(device: torch.device) -> Card:
    """Return the card of a GPU; an H200 for any other device (meta tensors)."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    name = "H100" if "H100" in properties.name else H200.name
    return Card(name, properties.multi_processor_count)


def sms(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; of an H200 for any other device."""
    return card(device).sms


@functools.cache
def has_triton() -> bool:
    """Return whether Triton can be imported."""
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # a fake module in sys.modules has no __spec__
        return False


def lacks_fp8(device: torch.device) -> str | None:
    """Return why a device cannot compute in FP8; None if it can."""
    if device.type != "cuda":
        return f"needs a CUDA device, got {device.type!r}"
    found = capability(device)
    if found < _FP8_CAPABILITY:
        return "needs a GPU with FP8 (sm_89 or later), got sm_{}{}".format(*found)
    return None


def lacks_triton(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on a device; None if they can."""
    return lacks_fp8(device) or (None if has_triton() else "triton is not installed")


@functools.cache
def gluon_is_off() -> str | None:
    """Return why Gluon kernels are switched off; None if they are not."""
    if os.environ.get(FAST_PATH_VARIABLE) == "0":
        return f"switched off by {FAST_PATH_VARIABLE}=0"
    if importlib.util.find_spec("triton.experimental.gluon") is None:
        return "this Triton has no Gluon"
    return None


def lacks_gluon(device: torch.device) -> str | None:
    """Return why Gluon kernels cannot run on a device; None if they may be tried."""
    return lacks_triton(device) or gluon_is_off()
