"""Whether the operands of a linear fit together, and the dtype of its output."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import checks
from ..recipe import Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor, check_same_scaling
from ..tensor.weight import BlockwiseFP8Weight


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives ``x``; None where it is off."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # which raises for meta
        return torch.get_autocast_dtype(kind)
    return None


def check_linear(x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe) -> torch.dtype:
    """The output dtype of ``linear(x, w, bias, recipe=recipe)``.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
    """
    for tensor, what in ((x, "the input"), (w, "the weight")):
        checks.high_precision(tensor, f"{what} of an FP8 linear")
    checks.rank(w, (2,), "the weight of an FP8 linear", "stacks of experts need grouped_mm")
    if x.ndim == 0:
        raise ValueError("the input of an FP8 linear is a scalar: expected shape [..., K]")
    checks.same_k(x, w, "input", "weight")
    checks.same_device(x, w, "the input", "the weight")
    expected = recipe.activation_format.block_shape
    if isinstance(x, BlockwiseFP8Tensor) and x.block_shape != expected:
        raise ValueError(
            f"the input of an FP8 linear has blocks of {x.block_shape}: expected {expected}; "
            f"blocktensor.quantize(x) makes them"
        )
    for tensor in (x, w):
        if isinstance(tensor, (BlockwiseFP8Tensor, BlockwiseFP8Weight)):
            check_same_scaling(recipe.activation_format, tensor.format)
    if bias is not None:
        checks.same_device(x, bias, "the input", "the bias")
        if bias.shape != w.shape[:1]:
            raise ValueError(f"the bias has shape {list(bias.shape)}: expected [{w.shape[0]}]")
    autocast = autocast_dtype(x)
    if autocast is not None:
        return autocast
    others = {"weight": w} if bias is None else {"weight": w, "bias": bias}
    for what, other in others.items():
        if other.dtype != x.dtype:
            raise TypeError(
                f"the input is {x.dtype} and the {what} {other.dtype}: convert one of them, or "
                f"run under torch.autocast"
            )
    return x.dtype
