"""The differentiable RMS norms of transformers, in few kernels.

torch's own ops compute the reciprocal of the root mean square, since their order of sums decides
the bits. The backward runs the ops of autograd for the eager ops, in their order. Saved for
backward: x, 1 / rms of each row and the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import checks
from ..ops.norm import reference
from ..ops.norm.ops import gradients, normalize, rstd_of
from ..ops.norm.reference import NormKind
from ..ops.runtime.specialize import must_dispatch
from .backward import FP8Function, Gradients, given_out, run_backward

Rounding = Literal["torch", "llama", "gemma"]
"""Kinds of RMS norms; the last two are :data:`NormKind`."""

_KINDS = get_args(Rounding)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float | None, kind: Rounding) -> Tensor:
    """Run :func:`blocktensor.functional.rms_norm`."""
    _check(x, weight, eps, kind)
    if kind == "torch" or weight is None:  # torch has one kernel for it
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    if must_dispatch(x) or must_dispatch(weight) or torch._C._are_functorch_transforms_active():
        return reference.rms_norm(x, weight, eps, kind)
    return normed(x, weight, eps, kind)


def _check(x: Tensor, weight: Tensor | None, eps: object, kind: str) -> None:
    if kind not in _KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(_KINDS)}")
    checks.high_precision_dtype(x, "the input of rms_norm")
    if x.ndim == 0:
        raise ValueError("the input of rms_norm is a scalar: expected shape [..., K]")
    if eps is not None and not isinstance(eps, (int, float)):
        raise TypeError(f"eps is a {type(eps).__name__}: expected a number or None")
    if weight is None:
        return
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"the weight of rms_norm has shape {list(weight.shape)}: expected "
            f"{list(x.shape[-1:])}, a number for each feature of the input"
        )
    if weight.device != x.device:
        raise ValueError(
            f"the input of rms_norm is on {x.device} and the weight on {weight.device}: move them "
            f"to one device"
        )
    if kind != "torch" and weight.dtype != x.dtype:
        raise TypeError(
            f"the input of rms_norm is {x.dtype} and the weight {weight.dtype}: convert one of "
            f"them; kind='torch' alone takes both"
        )


def normed(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
    """Return an RMS norm in the dtype of x; one kernel computes the values after the sums.

    Args:
        x: ``[..., K]``.
        weight: ``[K]``, dtype of x.
        eps: added to the mean of squares.
        kind: "llama": ``weight * (x / rms).to(x.dtype)``, as Llama, Mistral, Qwen and DeepSeek
            write it; "gemma": ``(x / rms * (1 + weight))`` in fp32, then rounded.
    """
    made: Tensor = _RMSNorm.apply(x, weight, eps, kind)
    return given_out(made, made.shape)


class _RMSNorm(FP8Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
        rstd = rstd_of(x, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.kind = kind
        ctx.set_materialize_grads(False)
        return normalize(x, rstd, weight, kind)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return run_backward(ctx, grads, _gradients, (True, True))


def _gradients(ctx: Any, saved: Sequence[Tensor], grads: list[Any], asked: list[bool]) -> Gradients:
    """Return a gradient for each argument of :meth:`_RMSNorm.forward`."""
    x, rstd, weight = saved
    grad = grads.pop()
    if grad is None:
        return (None,) * 4
    return *gradients(grad, x, rstd, weight, ctx.kind, *asked), None, None
