"""The differentiable cast of an activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..ops import checks
from ..ops.cast.ops import quantize_forms
from ..ops.runtime.specialize import must_dispatch
from ..recipe import DEFAULT_RECIPE, Recipe, check_recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from .plan import refuse_export


def quantize(x: Tensor, recipe: Recipe | None = None) -> BlockwiseFP8Tensor:
    """Cast an activation ``x[..., K]`` once for several linear layers (q, k, v; gate, up).

    Both forms are made from one read. Differentiable: the gradient passes straight through.

    Args:
        x: bf16, fp16 or fp32, ``[..., K]``. With ``Recipe(wgrad_input="high_precision")`` the
            result refers to it, and it must not be changed in place before the linear layers run.
        recipe: the recipe of the weights that it will be multiplied by. ``scale`` must agree and,
            if they are trained, ``wgrad_input``. Default ``Recipe()``.

    Returns:
        An FP8 tensor of the shape and dtype of x, which linear layers take in the place of x.

    Raises:
        TypeError, ValueError: another type or dtype, or a scalar.
        NotImplementedError: a sparse tensor or a DTensor; ``torch.export`` of a gradient.

    Examples:
        >>> x = torch.randn(8, 256, dtype=torch.bfloat16)
        >>> wq, wk = torch.randn(2, 128, 256, dtype=torch.bfloat16)
        >>> y = blocktensor.quantize(x)  # cast once for both
        >>> blocktensor.functional.linear(y, wq).shape, blocktensor.functional.linear(y, wk).shape
        (torch.Size([8, 128]), torch.Size([8, 128]))
    """
    check_recipe(recipe)
    if isinstance(x, BlockwiseFP8Tensor):
        return x
    checks.tensor(x, "x")
    checks.has_memory(x, "the tensor to quantize")
    refuse_export("quantize(x) of an x with a gradient", "Export under torch.no_grad()", x)
    return _Quantize.apply(x, recipe or DEFAULT_RECIPE)


def cast_activation(x: Tensor, recipe: Recipe) -> BlockwiseFP8Tensor:
    """Cast the input ``x[..., K]`` of linear layers by ``recipe``, without a gradient."""
    format, other = recipe.activation_format, recipe.wgrad_input_format
    source = x.detach() if recipe.wgrad_input == "high_precision" else None
    cast = BlockwiseFP8Tensor(
        *quantize_forms(x, format, other),
        shape=x.shape,
        dtype=x.dtype,
        recipe=recipe,
        formats=(format, other or format),
        source=source,
    )
    if source is not None and not (must_dispatch(x) or x.is_inference()):
        cast.source_version = source.data_ptr(), source._version
    return cast


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, recipe: Recipe) -> BlockwiseFP8Tensor:
        return cast_activation(x, recipe)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None
