"""The differentiable RMS norms of transformers: one kernel for each direction (``ops/norm``).

Results have the bits of eager ops and of their gradients by autograd. Saved for backward: x, 1 /
rms of each row and the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import checks
from ..ops.norm import reference
from ..ops.norm.ops import gradients, normalized
from ..ops.norm.reference import NormKind
from ..ops.runtime.specialize import must_dispatch
from . import plan
from .backward import FP8Function, Gradients, given_out, refuse_gradients, run_backward
from .repeat import Repeated

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
    """Return an RMS norm in the dtype of x.

    Args:
        x: ``[..., K]``.
        weight: ``[K]``, dtype of x.
        eps: added to the mean of squares.
        kind: "llama": ``weight * (x / rms).to(x.dtype)``, as Llama, Mistral, Qwen and DeepSeek
            write it; "gemma": ``(x / rms * (1 + weight))`` in fp32, then rounded.
    """
    operands = x, weight, eps, kind
    known = repeat.run(operands)
    if known is None and x.device.type in plan.RECORDED_DEVICES:
        known = repeat.remember(operands, _Choices(eps, kind))
    if known is not None:
        return known
    made: Tensor = _RMSNorm.apply(*operands)
    return given_out(made, x.shape)


class _Choices(NamedTuple):
    """The arguments of a norm that are no tensors."""

    eps: float
    kind: NormKind


class _RMSNorm(FP8Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
        ctx.choices = _Choices(eps, kind)
        y, saved, _ = _forward(ctx.choices, x, weight)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return run_backward(ctx, grads, _gradients_of_context, (True, True))


def _forward(
    choices: _Choices, x: Tensor, weight: Tensor, *_: object
) -> tuple[Tensor, Sequence[Tensor], None]:
    """Return the norm, the tensors to save, and None for the state."""
    y, rstd = normalized(_matrix(x), weight, choices.eps, choices.kind)
    return y, (x, rstd, weight), None


def _gradients_of_context(
    ctx: Any, saved: Sequence[Tensor], grads: list[Any], asked: list[bool]
) -> Gradients:
    return *_gradients(ctx.choices, saved, grads, asked), None, None


def _gradients_of_node(
    choices: _Choices, _: None, saved: Sequence[Tensor], grads: list[Any], asked: list[bool]
) -> Gradients:
    """Return the gradients for the node that ``repeat.py`` makes."""
    refuse_gradients(grads)
    return _gradients(choices, saved, grads, asked)


def _gradients(
    choices: _Choices, saved: Sequence[Tensor], grads: list[Any], asked: list[bool]
) -> Gradients:
    """Return the gradients of x and of the weight."""
    x, rstd, weight = saved
    grad = grads.pop()
    if grad is None:
        return None, None
    dx, dw = gradients(grad, _matrix(x), rstd, weight, choices.kind, *asked)
    return None if dx is None else dx.view(x.shape), dw


def _matrix(x: Tensor) -> Tensor:
    """Return x as a matrix if it is contiguous, so that one recorded call serves all row counts.

    Other layouts stay, because results of torch's ops have the layout of their operands.
    """
    return x.flatten(0, -2) if x.ndim > 2 and x.is_contiguous() else x


repeat = Repeated(
    "RMSNormBackward",
    lambda x, weight, eps, kind: _Choices(eps, kind),
    _gradients_of_node,
    _forward,
    with_rows=(0,),
)
