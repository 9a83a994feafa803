"""The differentiable RMS norm: its values, or the casts that FP8 products read.

The reciprocal of the root mean square comes from torch's own ops, whose order of sums is part of
the bits. Backward repeats what autograd makes of the eager ops, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from torch import Tensor

from ..ops.norm.ops import gradients, normalize, rstd_of
from ..ops.norm.reference import NormKind
from ..ops.producers.norm_ops import normalized
from ..ops.producers.norm_reference import rms_norm as eager
from ..recipe import DEFAULT_RECIPE, Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from .backward import FP8Function, Gradients, run_backward
from .quantize import quantize


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    kind: NormKind = "llama",
    recipe: Recipe = DEFAULT_RECIPE,
) -> BlockwiseFP8Tensor:
    """Run :func:`blocktensor.functional.rms_norm`."""
    if kind not in get_args(NormKind):
        raise ValueError(f"kind {kind!r}: expected one of {', '.join(get_args(NormKind))}")
    if x.ndim == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"x has shape {list(x.shape)} and the weight {list(weight.shape)}: expected [..., K] "
            f"and [K]"
        )
    if recipe.wgrad_input_format is None or weight.dtype != x.dtype:
        return quantize(eager(x, weight, eps, kind), recipe)
    made: BlockwiseFP8Tensor = _RMSNorm.apply(x, weight, eps, kind, recipe)
    return made


def normed(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
    """Return the values of an RMS norm, of the dtype of x, from one kernel after its sums.

    Args:
        x: ``[..., K]``.
        weight: ``[K]``, dtype of x.
        eps: added to the mean of squares.
        kind: "llama" or "gemma", see :func:`blocktensor.functional.rms_norm`.
    """
    made: Tensor = _RMSNorm.apply(x, weight, eps, kind, None)
    return made


class _RMSNorm(FP8Function):
    """The norm: in FP8 if there is a recipe, else plain."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, kind: NormKind, recipe: Recipe | None
    ) -> Tensor:
        rstd = rstd_of(x, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.kind = kind
        ctx.set_materialize_grads(False)
        if recipe is None:
            return normalize(x, rstd, weight, kind)
        rows = x.reshape(-1, x.shape[-1])
        formats = recipe.activation_format, recipe.wgrad_input_format
        forms = normalized(rows, rstd.reshape(-1, 1), weight, kind, *formats)
        return BlockwiseFP8Tensor(*forms, shape=x.shape, dtype=x.dtype, recipe=recipe)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return run_backward(ctx, grads, _gradients, (True, True))


def _gradients(ctx: Any, saved: Sequence[Tensor], grads: list[Any], asked: list[bool]) -> Gradients:
    """Return the gradients of the arguments of :meth:`_RMSNorm.forward`."""
    x, rstd, weight = saved
    grad, none = grads.pop(), [None] * 3
    if grad is None:
        return None, None, *none
    return *gradients(grad, x, rstd, weight, ctx.kind, *asked), *none
