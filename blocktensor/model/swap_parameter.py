"""Replacement of a parameter's content that keeps the identity of the object."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_FP8_ATTRIBUTES = {
    *("rowwise_data", "rowwise_scale", "columnwise_data", "columnwise_scale", "format"),
    *("recipe", "master", "cache", "transposed"),
}
"""Attributes of the FP8 types, which a parameter that leaves such a type must not keep."""


def swap_in(parameter: Tensor, converted: Tensor) -> None:
    """Give ``parameter`` the content of ``converted``; ties and optimizers keep the same object.

    Raises:
        RuntimeError: an autograd graph or a wrapper such as DDP uses the parameter.
    """
    new = nn.Parameter(converted, requires_grad=parameter.requires_grad)
    del converted
    new.grad = parameter.grad
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    try:
        torch.utils.swap_tensors(parameter, new)
    except RuntimeError as error:
        raise RuntimeError(
            f"cannot convert a parameter of shape {list(parameter.shape)} in place ({error}): "
            f"convert the model before wrapping it in DDP or FSDP, and not between a forward and "
            f"its backward"
        ) from error
    for name, value in new.__dict__.items():  # attributes that other code has set on the parameter
        if name not in _FP8_ATTRIBUTES:
            parameter.__dict__.setdefault(name, value)
    if any(hooks):
        parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks
