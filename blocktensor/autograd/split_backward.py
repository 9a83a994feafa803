"""Pipelining's zero-bubble schedules: the half of a backward that computes weight gradients.

Torch captures these gradients and adds them to ``.grad`` itself. For a weight with a ``main_grad``
they go there: while that code runs, backward adds to the buffer and returns zeros without memory,
and ``.grad`` is put back.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_NAME = "stage_backward_weight"
_running: list[object] = []


def is_running() -> bool:
    """Return True while any thread computes the weight half of a backward.

    On CUDA autograd runs backward in threads of its own.
    """
    return bool(_running)


def watch() -> None:
    """Wrap pipelining's function, if it was imported, so that :func:`is_running` knows of it."""
    for name in ("stage", "_backward"):
        module = sys.modules.get(f"torch.distributed.pipelining.{name}")
        original = getattr(module, _NAME, None)
        if original is not None and not hasattr(original, "__wrapped__"):
            setattr(module, _NAME, _noticed(original))


def _noticed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def stage_backward_weight(weights: Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        given = list(weights)
        held = [(w, w.grad) for w in given if getattr(w, "main_grad", None) is not None]
        _running.append(original)
        try:
            return original(iter(given), *args, **kwargs)
        finally:
            _running.pop()
            for weight, grad in held:
                weight.grad = grad

    return stage_backward_weight


def in_place_of_added(main_grad: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return zeros for torch to sum in a split backward, else None: the gradient was added."""
    if not _running:
        return None
    return torch.zeros((), dtype=dtype, device=main_grad.device).expand(main_grad.shape)
