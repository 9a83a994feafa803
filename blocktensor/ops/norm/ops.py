"""Compute the elementwise passes of an RMS norm: the functions to call.

They are not registered as ops: under compilers and dispatch modes they run torch's ops, which
compilers fuse with the sums between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..devices import lacks_triton
from ..op import unregistered
from ..registry import Backend, first_choice
from . import reference
from .reference import NormKind

NORM_BACKENDS: tuple[Backend[Tensor], ...] = (
    Backend("triton", ("norm.triton_passes",), lacks_triton),
    Backend("reference", ("norm.reference",), launches=False),
)
"""All backends, best first; the reference takes every x ``[T, K]``."""


def rstd_of(x: Tensor, eps: float) -> Tensor:
    """Return the reciprocal root mean square of the rows of x ``[..., K]``, fp32 ``[..., 1]``."""
    if not _in_rows(x):
        return reference.rstd_of(reference.squares(x), eps)
    return reference.rstd_of(_squares(_rows(x)).view(x.shape), eps)


def normalize(x: Tensor, rstd: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    """Return an RMS norm of x ``[..., K]``, in its dtype.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32.
        rstd: fp32 ``[..., 1]``, from :func:`rstd_of`.
        weight: ``[K]``, dtype of x.
        kind: "llama" or "gemma", see :func:`~.reference.normalize`.
    """
    if not _in_rows(x):
        return reference.normalize(x, rstd, weight, kind)
    made: Tensor = _normalize(_rows(x), _rows(rstd), weight.contiguous(), kind)
    # not a view, which callers of an autograd function could not change in place
    return torch.ops.aten._unsafe_view(made, x.shape)


def gradients(
    grad: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    kind: NormKind,
    needs_dx: bool,
    needs_dw: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of an RMS norm, as autograd computes them for eager ops.

    Args:
        grad: the gradient of the norm, ``[..., K]``, dtype of x.
        x: ``[..., K]`` bf16, fp16 or fp32.
        rstd: fp32 ``[..., 1]``, from :func:`rstd_of`.
        weight: ``[K]``, dtype of x.
        kind: "llama" or "gemma", see :func:`~.reference.normalize`.
        needs_dx, needs_dw: which gradients are wanted.

    Returns:
        The gradients of x and of the weight, or None where not wanted.
    """
    if not (needs_dx or needs_dw):
        return None, None
    shape, in_rows = x.shape, _in_rows(x) and _in_rows(grad)
    terms_of: Callable[..., Any] = _gradient_terms if in_rows else reference.gradient_terms
    input_gradient: Callable[..., Any] = _input_gradient if in_rows else reference.input_gradient
    if in_rows:
        grad, x, rstd, weight = _rows(grad), _rows(x), _rows(rstd), weight.contiguous()
    of_rows, of_weight = terms_of(grad, x, rstd, weight, kind, needs_dw)
    dw = None
    if of_weight is not None:
        dw = of_weight.view(shape).sum_to_size(weight.shape).to(weight.dtype)
    if not needs_dx:
        return None, dw
    # the backwards of rsqrt, mean and pow
    of_rstd = of_rows.view(shape).sum_to_size(*shape[:-1], 1).view(rstd.shape)
    of_mean = -0.5 * of_rstd * rstd.pow(3) / shape[-1]
    return input_gradient(grad, x, rstd, of_mean, weight, kind).view(shape), dw


def _in_rows(x: Tensor) -> bool:
    """Return True if x consists of contiguous rows.

    Results of torch's ops have the layout of their inputs, and sums over other layouts have other
    bits: such x run as torch's ops.
    """
    return x.is_contiguous() or (x.ndim == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1])


def _rows(x: Tensor) -> Tensor:
    """Return x as ``[T, K]``."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _backend(x: Tensor, *_: object) -> Backend[Tensor]:
    return first_choice(NORM_BACKENDS, x, x.device).backend


_squares = unregistered(reference.squares, _backend)
_normalize = unregistered(reference.normalize, _backend)
_gradient_terms = unregistered(reference.gradient_terms, _backend)
_input_gradient = unregistered(reference.input_gradient, _backend)
