"""List the backends of producers: the backends of casts, if they support every source."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cast.choose_backend import CAST_BACKENDS, CastProblem
from ..formats import BlockFormat
from ..registry import Backend, Choice, first_choice
from . import reference
from .activations import ACTIVATIONS, ActivationName


@dataclass(frozen=True)
class ProducerProblem:
    """An activation, the sources of a producer, and the formats of the forms that it writes."""

    activation: ActivationName
    sources: tuple[Tensor, ...]
    rowwise: BlockFormat | None
    columnwise: BlockFormat | None


def _declines(of_cast: Backend[CastProblem], problem: ProducerProblem) -> str | None:
    if ACTIVATIONS[problem.activation].ptx is None:
        return f"has no PTX of {problem.activation}"
    formats = [format for format in (problem.rowwise, problem.columnwise) if format is not None]
    of_bf16 = problem.sources[0].dtype == torch.bfloat16
    if of_cast.name == "triton" and len(problem.sources) > 2 and not of_bf16:
        return "computes from three tensors in bf16 alone: others would spill"
    for source in problem.sources:
        if reason := of_cast.declines(CastProblem(source, *formats)):
            return reason
        if source.stride(-1) != 1 and source.shape[-1] > 1:
            return "reads rows of unit stride"
        rows_apart = source.stride(0) | source.shape[1]
        if not of_bf16 and rows_apart % 8:  # would spill registers
            return "reads fp16 and fp32 in whole vectors of eight elements"
    return None


def _words() -> tuple[Any, ...]:
    from . import kernels

    return (kernels.words,)


def _elements() -> tuple[Any, ...]:
    from . import kernels

    return (kernels.elements,)


def _backend(
    of_cast: Backend[CastProblem], modules: Callable[[], tuple[Any, ...]]
) -> Backend[ProducerProblem]:
    declines = functools.partial(_declines, of_cast)
    return Backend(of_cast.name, modules, of_cast.unusable, declines)


_GLUON, _TRITON, _ = CAST_BACKENDS

PRODUCER_BACKENDS: tuple[Backend[ProducerProblem], ...] = (
    _backend(_GLUON, _words),
    _backend(_TRITON, _elements),
    Backend("reference", lambda: (reference,), launches=False),
)
"""All backends, best first; the reference (eager ops and casts) takes every problem."""


def producer_backend(
    activation: ActivationName,
    sources: tuple[Tensor, ...],
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> Choice[ProducerProblem]:
    """Choose the backend that computes forms from ``sources``."""
    problem = ProducerProblem(activation, sources, rowwise, columnwise)
    return first_choice(PRODUCER_BACKENDS, problem, sources[0].device)
