"""Conversions of whole models: ``model.double()``, ``model.to(dtype)``, ``model.type(dtype)``."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

_APPLY = nn.Module._apply.__code__


def converts_a_model() -> bool:
    """Return True if ``nn.Module._apply`` calls, which replaces one parameter after the other.

    An error then would leave a model of which some parameters are converted, and a plain result a
    model whose FP8 is lost for good. So an FP8 weight stays one in every dtype; products refuse it
    in those that they cannot cast.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back
    return frame is not None
