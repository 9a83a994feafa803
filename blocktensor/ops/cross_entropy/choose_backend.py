"""The registry of backends of the loss of logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..devices import lacks_triton
from ..registry import Backend, first_choice, loaded


@dataclass(frozen=True)
class CrossEntropyProblem:
    """The logits, or a tensor like them, and what ``F.cross_entropy`` is told beside them."""

    logits: Tensor
    weight: Tensor | None
    label_smoothing: float


@dataclass(frozen=True)
class CrossEntropyKernels:
    """The function of a backend, with the signature of its namesake in ``reference.py``.

    Attributes:
        launches: True if it only allocates and launches kernels, so that calls can be recorded.
        more_bytes: that a logit takes for a while beside itself, with the FP8 forms of its
            gradient.
    """

    loss_and_gradient_: Callable[..., Tensor]
    launches: bool
    more_bytes: int


def _load_reference() -> CrossEntropyKernels:
    from . import reference

    return CrossEntropyKernels(reference.loss_and_gradient_, launches=False, more_bytes=12)


def _load_triton() -> CrossEntropyKernels:
    from . import triton_rows

    return CrossEntropyKernels(triton_rows.loss_and_gradient_, launches=True, more_bytes=2)


def _triton_declines(problem: CrossEntropyProblem) -> str | None:
    if problem.weight is not None or problem.label_smoothing != 0:
        return "has no weights of classes and no label smoothing"
    if problem.logits.stride(-1) != 1 and problem.logits.shape[-1] > 1:
        return "reads rows of unit stride"
    return None


CROSS_ENTROPY_BACKENDS: tuple[Backend[CrossEntropyProblem, CrossEntropyKernels], ...] = (
    Backend("triton", _load_triton, lacks_triton, _triton_declines),
    Backend("reference", _load_reference),
)
"""In order of preference; the reference takes every problem."""


def cross_entropy_kernels(problem: CrossEntropyProblem) -> CrossEntropyKernels:
    """The functions of the backend for a problem."""
    return loaded(first_choice(CROSS_ENTROPY_BACKENDS, problem, problem.logits.device).backend)
