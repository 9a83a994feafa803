"""The loss of logits, with its gradient in their place: the functions to call.

They are no registered ops: where they must go through the dispatcher, they are torch's ops.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..devices import lacks_triton
from ..op import unregistered
from ..registry import Backend, first_choice
from . import reference


@dataclass(frozen=True)
class CrossEntropyProblem:
    """The logits, or a tensor like them, and options of ``F.cross_entropy``."""

    logits: Tensor
    weight: Tensor | None
    label_smoothing: float


def _triton_declines(problem: CrossEntropyProblem) -> str | None:
    if problem.weight is not None or problem.label_smoothing != 0:
        return "has no weights of classes and no label smoothing"
    if problem.logits.stride(-1) != 1 and problem.logits.shape[-1] > 1:
        return "reads rows of unit stride"
    return None


CROSS_ENTROPY_BACKENDS: tuple[Backend[CrossEntropyProblem], ...] = (
    Backend("triton", ("cross_entropy.triton_rows",), lacks_triton, _triton_declines),
    Backend("reference", ("cross_entropy.reference",), launches=False),
)
"""In order of preference; the reference takes every problem."""


def loss_and_gradient_(
    logits: Tensor,
    target: Tensor,
    total: Tensor | None,
    ignore_index: int,
    weight: Tensor | None,
    label_smoothing: float,
) -> Tensor:
    """Return the loss of rows of logits, over which its gradient is written.

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


def more_bytes(logits: Tensor, weight: Tensor | None, label_smoothing: float) -> int:
    """Return the bytes that a logit takes for a while, with the FP8 forms of its gradient.

    Beside those of the logit itself. ``logits``: the logits, or a tensor like them.
    """
    problem = CrossEntropyProblem(logits, weight, label_smoothing)
    return 2 if _choose(problem).name == "triton" else 12


def _choose(problem: CrossEntropyProblem) -> Backend[CrossEntropyProblem]:
    return first_choice(CROSS_ENTROPY_BACKENDS, problem, problem.logits.device).backend


_loss_and_gradient_ = unregistered(
    reference.loss_and_gradient_,
    lambda logits, target, total, ignore_index, weight, label_smoothing: _choose(
        CrossEntropyProblem(logits, weight, label_smoothing)
    ),
)
