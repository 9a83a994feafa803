"""The differentiable RMS norm whose result is cast as it is computed.

The reciprocal of the root mean square comes from torch's own ops, whose order of sums is part of
the bits; what follows is cast as it is computed. Backward repeats what autograd makes of the eager
ops, in their order. A norm of torch is one kernel with a backward of its own; its result is cast
once, and freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.cast.ops import quantize_forms
from ..ops.formats import BlockFormat
from ..ops.norm.ops import gradients, rstd_of
from ..ops.norm.reference import NormKind
from ..ops.producers.norm_ops import normalized
from ..ops.producers.norm_reference import rms_norm as eager
from ..recipe import DEFAULT_RECIPE, Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.norm_call import AnyNormKind, NormCall
from ..tensor.normed_tensor import NormedTensor
from .backward import Gradients, asked_for, run_backward
from .quantize import quantize


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    kind: NormKind = "llama",
    recipe: Recipe = DEFAULT_RECIPE,
) -> BlockwiseFP8Tensor:
    """:func:`blocktensor.functional.rms_norm`."""
    if kind not in get_args(NormKind):
        raise ValueError(f"kind {kind!r}: expected one of {', '.join(get_args(NormKind))}")
    if x.ndim == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"x has shape {list(x.shape)} and the weight {list(weight.shape)}: expected [..., K] "
            f"and [K]"
        )
    if recipe.wgrad_input_format is None or weight.dtype != x.dtype:
        return quantize(eager(x, weight, eps, kind), recipe)
    made: BlockwiseFP8Tensor = _RMSNorm.apply(x, weight, eps, kind, recipe, True, False, False)
    return made


def normed(
    x: Tensor,
    weight: Tensor,
    eps: float | None,
    kind: AnyNormKind,
    recipe: Recipe,
    columnwise: bool,
    recompute: bool = False,
) -> NormedTensor:
    """:func:`rms_norm` whose values other ops than FP8 products may read too.

    Args:
        x: ``[..., K]``, of the dtype of the weight ``[K]``.
        eps: None for the default of torch's norms.
        recipe: its weight gradients read FP8.
        columnwise: whether weight gradients will read it.
        recompute: backward makes the form that those read, in place of saving it.
    """
    remakes = columnwise and recompute
    made: NormedTensor
    if kind == "torch":
        y = F.rms_norm(x, weight.shape, weight, eps)
        call = NormCall(x.detach(), weight.detach(), None, kind, eps)
        made = _Cast.apply(y, call, recipe, columnwise, remakes)
    else:
        assert eps is not None
        made = _RMSNorm.apply(x, weight, eps, kind, recipe, columnwise, True, remakes)
    return made


class _RMSNorm(torch.autograd.Function):
    boxed_grads_call = True

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        kind: NormKind,
        recipe: Recipe,
        columnwise: bool,
        readable: bool,
        remakes: bool,
    ) -> BlockwiseFP8Tensor:
        rstd, rows = rstd_of(x, eps), x.reshape(-1, x.shape[-1])
        formats = _formats(recipe, columnwise and not remakes)
        forms = normalized(rows, rstd.reshape(-1, 1), weight, kind, *formats)
        ctx.save_for_backward(x, rstd, weight)
        ctx.kind = kind
        ctx.set_materialize_grads(False)
        if readable:
            return NormedTensor.of(forms, NormCall(x, weight, rstd, kind), recipe, remakes)
        return BlockwiseFP8Tensor(*forms, shape=x.shape, dtype=x.dtype, recipe=recipe)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return run_backward(ctx, grads, _gradients)


def _formats(recipe: Recipe, columnwise: bool) -> tuple[BlockFormat, BlockFormat | None]:
    return recipe.activation_format, recipe.wgrad_input_format if columnwise else None


def _gradients(ctx: Any, saved: Sequence[Tensor], grads: list[Any]) -> Gradients:
    """The gradients of the arguments of :meth:`_RMSNorm.forward`."""
    x, rstd, weight = saved
    grad, none = grads.pop(), [None] * 6
    if grad is None:
        return None, None, *none
    needs_dx, needs_dw = asked_for(ctx, (True, True))
    return *gradients(grad, x, rstd, weight, ctx.kind, needs_dx, needs_dw), *none


class _Cast(torch.autograd.Function):
    """The result of a norm of torch with its casts; the gradient passes straight through."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, call: NormCall, recipe: Recipe, columnwise: bool, remakes: bool
    ) -> NormedTensor:
        forms = quantize_forms(y, *_formats(recipe, columnwise and not remakes))
        return NormedTensor.of(forms, call, recipe, remakes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None, None, None
