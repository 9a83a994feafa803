"""Compute RMS norms and their gradients: the functions to call.

They are not registered as ops: under compilers and dispatch modes they run torch's ops, which
compilers fuse.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..devices import lacks_triton
from ..op import unregistered
from ..registry import Backend, first_choice
from . import reference
from .reference import NormKind
from .row_sums import threads_of


def _declines(operands: tuple[Tensor, ...]) -> str | None:
    """Return why kernels do not take these operands: matrices of rows and, last, a weight."""
    *matrices, weight = operands
    x = matrices[0]
    if not all(map(_in_rows, matrices)) or not weight.is_contiguous():
        # results of torch's ops have the layouts of operands, and so their sums have other bits
        return "an operand does not consist of contiguous rows"
    if threads_of(x.shape[:-1].numel(), x.shape[-1]) is None:
        return "torch adds rows of this length in another way"
    return None


def _triton() -> tuple[Any, ...]:
    from . import triton_norm

    return (triton_norm,)


NORM_BACKENDS: tuple[Backend[tuple[Tensor, ...]], ...] = (
    Backend("triton", _triton, lacks_triton, _declines),
    Backend("reference", lambda: (reference,), launches=False),
)
"""All backends, best first; the reference takes all operands."""


def normalized(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> tuple[Tensor, Tensor]:
    """See :func:`~.reference.normalized`, of ``x[M, K]`` or of an x without contiguous rows."""
    made: tuple[Tensor, Tensor] = _normalized(x, weight, eps, kind)
    return made


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
        rstd: fp32 ``[..., 1]``, from :func:`normalized`.
        weight: ``[K]``, dtype of x.
        kind: "llama" or "gemma", see :func:`~.reference.normalized`.
        needs_dx, needs_dw: which gradients are wanted.

    Returns:
        The gradients of x and of the weight, or None where not wanted.
    """
    if not (needs_dx or needs_dw):
        return None, None
    dx, terms = _row_gradients(grad, x, rstd, weight, kind, needs_dx, needs_dw)
    dw = None if terms is None else terms.sum_to_size(weight.shape).to(weight.dtype)
    return dx, dw


def _in_rows(x: Tensor) -> bool:
    return x.is_contiguous() or (x.ndim == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1])


def _backend(*operands: Any) -> Backend[tuple[Tensor, ...]]:
    return first_choice(NORM_BACKENDS, operands, operands[0].device).backend


_normalized = unregistered(
    reference.normalized, lambda x, weight, *_: _backend(x, weight), with_rows=(0,)
)
_row_gradients = unregistered(
    reference.row_gradients,
    lambda grad, x, rstd, weight, *_: _backend(grad, x, rstd, weight),
    with_rows=(0, 1, 2),
)
