"""The registry of backends of an RMS norm's passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..devices import lacks_triton
from ..registry import Backend, first_choice, loaded


@dataclass(frozen=True)
class NormKernels:
    """The functions of a backend, each with the signature of its namesake in ``reference.py``.

    Attributes:
        launches: True if they only allocate and launch kernels, so that calls can be recorded.
    """

    squares: Callable[..., Tensor]
    normalize: Callable[..., Tensor]
    gradient_terms: Callable[..., tuple[Tensor, Tensor | None]]
    input_gradient: Callable[..., Tensor]
    launches: bool


def _kernels(passes: Any, launches: bool) -> NormKernels:
    return NormKernels(
        passes.squares, passes.normalize, passes.gradient_terms, passes.input_gradient, launches
    )


def _load_reference() -> NormKernels:
    from . import reference

    return _kernels(reference, launches=False)


def _load_triton() -> NormKernels:
    from . import triton_passes

    return _kernels(triton_passes, launches=True)


NORM_BACKENDS: tuple[Backend[Tensor, NormKernels], ...] = (
    Backend("triton", _load_triton, lacks_triton),
    Backend("reference", _load_reference),
)
"""In order of preference; the reference takes every x."""


def norm_kernels(x: Tensor) -> NormKernels:
    """The functions of the backend for x ``[T, K]``."""
    return loaded(first_choice(NORM_BACKENDS, x, x.device).backend)
