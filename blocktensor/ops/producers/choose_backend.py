"""The registry of backends of producers: those of the casts, where they take every source."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cast.choose_backend import CAST_BACKENDS, CastKernels, CastProblem
from ..cast.producer import Forms
from ..formats import BlockFormat
from ..registry import Backend, Choice, first_choice, loaded


@dataclass(frozen=True)
class ProducerKernels:
    """The functions of a backend, each with the signature of its namesake in ``reference.py``.

    Attributes:
        launches: True if they only allocate and launch kernels, so that calls can be recorded.
    """

    gated: Callable[..., Forms]
    gated_backward: Callable[..., tuple[Forms, Forms]]
    joint_gated_backward: Callable[..., Forms]
    gated_backward_with_h: Callable[..., Any]
    normalized: Callable[..., Forms]
    launches: bool


@dataclass(frozen=True)
class ProducerProblem:
    """The tensors that are read alike, and the formats of the forms that are written."""

    sources: tuple[Tensor, ...]
    rowwise: BlockFormat | None
    columnwise: BlockFormat | None


def _load_reference() -> ProducerKernels:
    from . import norm_reference, reference

    return ProducerKernels(
        reference.gated,
        reference.gated_backward,
        reference.joint_gated_backward,
        reference.gated_backward_with_h,
        norm_reference.normalized,
        launches=False,
    )


def _load_kernels(in_words: bool) -> ProducerKernels:
    from . import kernels

    return ProducerKernels(
        functools.partial(kernels.gated, in_words),
        functools.partial(kernels.gated_backward, in_words),
        functools.partial(kernels.joint_gated_backward, in_words),
        functools.partial(kernels.gated_backward_with_h, in_words),
        functools.partial(kernels.normalized, in_words),
        launches=True,
    )


def _declines(of_cast: Backend[CastProblem, CastKernels], problem: ProducerProblem) -> str | None:
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
        if not of_bf16 and rows_apart % 8:  # would spill
            return "reads fp16 and fp32 in whole vectors of eight elements"
    return None


def _backend(of_cast: Backend[CastProblem, CastKernels]) -> Backend[ProducerProblem, Any]:
    return Backend(
        of_cast.name,
        functools.partial(_load_kernels, of_cast.name == "gluon"),
        of_cast.unusable,
        functools.partial(_declines, of_cast),
    )


PRODUCER_BACKENDS: tuple[Backend[ProducerProblem, ProducerKernels], ...] = (
    *(_backend(of_cast) for of_cast in CAST_BACKENDS[:-1]),
    Backend("reference", _load_reference),
)
"""In order of preference; the reference, eager ops and casts, takes every problem."""


def producer_backend(
    sources: tuple[Tensor, ...], rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> Choice[ProducerProblem, ProducerKernels]:
    """The backend that computes forms from ``sources``."""
    problem = ProducerProblem(sources, rowwise, columnwise)
    return first_choice(PRODUCER_BACKENDS, problem, sources[0].device)


def producer_kernels(
    sources: tuple[Tensor, ...], rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> ProducerKernels:
    """The functions of :func:`producer_backend`."""
    return loaded(producer_backend(sources, rowwise, columnwise).backend)
