"""Stateless FP8: the same results as a converted model, without subclasses in it."""

from __future__ import annotations

from torch import Tensor

from .autograd import linear as _linear
from .autograd.quantize import quantize
from .recipe import Recipe

__all__ = ["linear", "quantize"]


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, recipe: Recipe | None = None
) -> Tensor:
    """``x wᵀ (+ bias)`` in blockwise FP8, forward and backward, for plain tensors.

    A converted model (:func:`blocktensor.convert`) computes the same bits.

    With ``torch.compile`` and activation checkpointing together, torch 2.11 saves intermediates of
    this function within a checkpointed region, as of any ``autograd.Function`` (pytorch#177396;
    2.13 does not): convert the model there.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, or ``blocktensor.quantize(x)``.
        w: ``[N, K]``, of x's dtype (any, under autocast).
        bias: ``[N]`` or None.
        recipe: numeric choices; default ``Recipe()``.

    Returns:
        ``[..., N]`` in x's dtype, or autocast's.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
    """
    return _linear.linear(x, w, bias, recipe=recipe)
