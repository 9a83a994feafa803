"""The loss of logits, with its gradient in their place: the functions to call.

They are no registered ops: where they must go through the dispatcher, they are torch's ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..runtime.specialize import Specialized, recorded
from . import reference
from .choose_backend import CrossEntropyProblem, cross_entropy_kernels


def loss_and_gradient_(
    logits: Tensor,
    target: Tensor,
    total: Tensor | None,
    ignore_index: int,
    weight: Tensor | None,
    label_smoothing: float,
) -> Tensor:
    """The loss of rows of logits, over which its gradient is written.

    See :func:`~.reference.loss_and_gradient_`. A class that does not exist raises on a CPU; on a
    GPU it makes the loss and the gradient of its row nan.

    Args:
        logits: ``[T, V]`` bf16, fp16 or fp32, taken in fp32; overwritten.
        target: int64 ``[T]``, contiguous.
        total: a scalar that the sum of losses is divided by; None for 1.
        ignore_index, weight, label_smoothing: as in ``F.cross_entropy``.

    Returns:
        An fp32 scalar.
    """
    args = logits, target, total, ignore_index, weight, label_smoothing
    if not len(logits):
        return reference.loss(*args)
    made: Tensor = _loss_and_gradient_(*args)
    return made


def _decide(
    logits: Tensor, target: Any, total: Any, ignore_index: int, weight: Any, smoothing: float
) -> Callable[..., Tensor]:
    kernels = cross_entropy_kernels(CrossEntropyProblem(logits, weight, smoothing))
    return recorded(kernels.loss_and_gradient_, kernels.launches)


_loss_and_gradient_ = Specialized(_decide, reference.loss_and_gradient_)
