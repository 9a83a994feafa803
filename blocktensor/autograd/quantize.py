"""The differentiable cast of an activation, and the RMS norms whose results are cast.

torch's own ops compute the reciprocal of the root mean square, since their order of sums decides
the bits. The backward runs the ops of autograd for the eager ops, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..ops import checks
from ..ops.cast.ops import quantize_forms
from ..ops.norm.ops import gradients as norm_gradients
from ..ops.norm.ops import normalize, rstd_of
from ..ops.norm.reference import NormKind
from ..ops.runtime.specialize import must_dispatch
from ..recipe import DEFAULT_RECIPE, Recipe, check_recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from .backward import FP8Function, Gradients, given_out, run_backward


def quantize(x: Tensor, recipe: Recipe | None = None) -> BlockwiseFP8Tensor:
    """Cast an activation ``x[..., K]`` once for several linear layers (q, k, v; gate, up).

    Both forms are made from one read. Differentiable: the gradient passes straight through.

    Args:
        x: bf16, fp16 or fp32, ``[..., K]``. With ``Recipe(wgrad_input="high_precision")`` the
            result refers to it, and it must not be changed in place before the linear layers run.
        recipe: the recipe of the weights that it will be multiplied by. ``scale`` must agree and,
            if they are trained, ``wgrad_input``. Default ``Recipe()``.

    Raises:
        TypeError, ValueError: another type or dtype, or a scalar.
    """
    check_recipe(recipe)
    if isinstance(x, BlockwiseFP8Tensor):
        return x
    checks.tensor(x, "x")
    return _Quantize.apply(x, recipe or DEFAULT_RECIPE)


def cast_activation(x: Tensor, recipe: Recipe) -> BlockwiseFP8Tensor:
    """Cast the input ``x[..., K]`` of linear layers by ``recipe``, without a gradient."""
    format, other = recipe.activation_format, recipe.wgrad_input_format
    source = x.detach() if other is None else None
    made = BlockwiseFP8Tensor(
        *quantize_forms(x, format, other),
        shape=x.shape,
        dtype=x.dtype,
        recipe=recipe,
        formats=(format, other or format),
        source=source,
    )
    if source is not None and not (must_dispatch(x) or x.is_inference()):
        made.source_version = source.data_ptr(), source._version
    return made


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, recipe: Recipe) -> BlockwiseFP8Tensor:
        return cast_activation(x, recipe)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


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
        return run_backward(ctx, grads, _norm_gradients, (True, True))


def _norm_gradients(
    ctx: Any, saved: Sequence[Tensor], grads: list[Any], asked: list[bool]
) -> Gradients:
    """Return a gradient for each argument of :meth:`_RMSNorm.forward`."""
    x, rstd, weight = saved
    grad = grads.pop()
    if grad is None:
        return (None,) * 4
    return *norm_gradients(grad, x, rstd, weight, ctx.kind, *asked), None, None
