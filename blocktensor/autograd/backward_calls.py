"""``torch.autograd.grad`` and ``backward`` with inputs of the FP8 types.

A backward may run forwards again (activation checkpointing), which need the overrides of the FP8
types. Torch would switch those off for as long as such a call runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves, tree_map

from ..tensor.base import FP8Base


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    if not kwargs.get("materialize_grads"):  # which has to know the shapes
        inputs = tree_map(_edge, inputs)
    return _run(torch.autograd.grad, outputs, inputs, *args, **kwargs)


def _backward(tensors: Any, *args: Any, inputs: Any = None, **kwargs: Any) -> Any:
    inputs = tree_map(_edge, inputs)
    return _run(torch.autograd.backward, tensors, *args, inputs=inputs, **kwargs)


def _edge(x: Any) -> Any:
    """The edge of the graph that leads to an FP8 tensor; anything else itself."""
    if not isinstance(x, FP8Base) or not x.requires_grad or is_dynamo_compiling():
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(x)


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(x, FP8Base) for x in tree_leaves((args, kwargs))):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    return function(*args, **kwargs)


BACKWARD_CALLS: dict[Any, Callable[..., Any]] = {
    torch.autograd.grad: _grad,
    torch.autograd.backward: _backward,
}
"""Torch functions of all FP8 types."""
