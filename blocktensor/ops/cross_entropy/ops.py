"""Compute the loss of logits, and overwrite them by its gradient: the functions to call.

They are not registered as ops: under compilers and dispatch modes, they run torch's ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..devices import lacks_triton
from ..op import unregistered
from ..registry import Backend, first_choice


def _triton() -> tuple[Any, ...]:
    from . import triton_rows

    return (triton_rows,)


CROSS_ENTROPY_BACKENDS: tuple[Backend[torch.device], ...] = (
    Backend("triton", _triton, lacks_triton),
    Backend("reference", lambda: (reference,), launches=False),
)
"""All backends, best first; the reference runs on any device."""


def loss_and_gradient_(
    logits: Tensor,
    target: Tensor,
    total: Tensor | None,
    ignore_index: int,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of rows of logits, and write its gradient over them.

    See :func:`~..reference.loss_and_gradient_`. A target that is not a class raises on a CPU; on a
    GPU the loss and the gradient of its row become nan.

    Args:
        logits: ``[T, V]`` bf16, fp16 or fp32, in rows of unit stride, converted to fp32;
            overwritten.
        target: int64 ``[T]``, contiguous.
        total: a scalar that the sum of losses is divided by; None for 1.
        ignore_index, label_smoothing: as in ``F.cross_entropy``.
        weight: fp32 ``[V]``, contiguous, the weights of the classes; None for ones.

    Returns:
        An fp32 scalar.
    """
    args = logits, target, total, ignore_index, weight, label_smoothing
    if not len(logits):
        return reference.loss(*args)
    made: Tensor = gradient_of_logits(*args)
    return made


def more_bytes(like: Tensor) -> int:
    """Return the temporary bytes for each logit, including the FP8 forms of its gradient.

    The logit itself is not included. ``like``: a tensor on the device of the logits.
    """
    return 2 if _backend(like).name == "triton" else 12


def _backend(like: Tensor, *_: object) -> Backend[torch.device]:
    return first_choice(CROSS_ENTROPY_BACKENDS, like.device, like.device).backend


gradient_of_logits = unregistered(reference.loss_and_gradient_, _backend)
