"""Replacement of a parameter's content that keeps the identity of the object."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .weight import BlockwiseFP8Weight

_FP8_ATTRIBUTES = {
    *("rowwise_data", "rowwise_scale", "columnwise_data", "columnwise_scale", "format"),
    "generation",
    *("recipe", "master", "cache", "transposed", "_is_param"),
}
"""Attributes of the FP8 types, which a parameter that leaves such a type must not keep."""


def swap_in(parameter: Tensor, converted: Tensor) -> None:
    """Give ``parameter`` the content of ``converted``; ties and optimizers keep the same object.

    Hooks, attributes that other code has set, and ``main_grad`` stay.

    Raises:
        RuntimeError: an autograd graph or a wrapper such as DDP uses the parameter.
    """
    new = nn.Parameter(converted, requires_grad=parameter.requires_grad)
    del converted
    carry_over(parameter, new)
    new.grad = parameter.grad
    try:
        torch.utils.swap_tensors(parameter, new)
    except RuntimeError as error:
        raise RuntimeError(
            f"cannot convert a parameter of shape {list(parameter.shape)} in place ({error}): "
            f"convert the model before wrapping it in DDP or FSDP, and not between a forward and "
            f"its backward"
        ) from error


def carry_over(old: Tensor, new: Tensor) -> None:
    """Give ``new``, which is to be swapped in for ``old``, its hooks, attributes and main_grad."""
    for name, value in old.__dict__.items():
        if name not in _FP8_ATTRIBUTES:
            new.__dict__.setdefault(name, value)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, hooks):
            setattr(new, hooks, getattr(old, hooks))
    if isinstance(old, BlockwiseFP8Weight) and isinstance(new, BlockwiseFP8Weight):
        main_grad = old.cache.main_grad
        new.cache.main_grad = None if main_grad is None else main_grad.to(new.device)
