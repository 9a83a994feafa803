"""Decide which saved tensors are activations that may be rounded to FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from ..ops.checks import HIGH_PRECISION
from ..tensor.base import MasterBase
from ..tensor.torch_internals.callers import is_saved_by_graph

MIN_ELEMENTS = 4096
"""Tensors with fewer elements are kept: statistics, biases, small outputs."""

MAX_HEAD = 256
"""Elements of a head of attention, at most."""

PARAMETER = "parameter"
SMALL = f"less than {MIN_ELEMENTS} elements"
OF_GRAPH = "of a compiled graph"
HEADS = "in heads, for attention"

_WALK = 12
"""Nodes of the graph that a tensor computed from parameters alone may have behind it."""

_READS_DATA = ("Embedding", "Index", "Gather", "FP8")
"""Beginnings of the names of nodes whose outputs are no weights, whatever their inputs are."""

_MATMULS = ("Mm", "Addmm", "Bmm", "Baddbmm", "Convolution", "Linear")
"""Beginnings of the names of nodes whose inputs without gradients are data, not constants."""

_ATTRIBUTE = "_blocktensor_activation"


def mark_activations(*tensors: Tensor | None) -> None:
    """Tell that an autograd function saves these intermediates, which have no gradient."""
    for tensor in tensors:
        if tensor is not None:
            setattr(tensor, _ATTRIBUTE, True)


def is_strided(x: Tensor) -> bool:
    """Return False for sparse and nested tensors."""
    return x.layout is torch.strided and not x.is_nested


def why_kept(x: Tensor) -> str | None:
    """Return why a saved tensor is not packed, or None for an activation."""
    if type(x) is not Tensor:
        is_parameter = isinstance(x, (nn.Parameter, MasterBase))
        return PARAMETER if is_parameter else f"a {type(x).__name__}"
    if x.dtype not in HIGH_PRECISION:
        return "not bf16, fp16 or fp32"
    if not is_strided(x):
        return "not strided"
    if not (x.requires_grad or hasattr(x, _ATTRIBUTE)):
        is_large = x.numel() >= MIN_ELEMENTS and x.ndim > 1
        return OF_GRAPH if is_large and is_saved_by_graph() else "needs no gradient"
    base = x if x._base is None else x._base
    if x.requires_grad and base.is_leaf:
        return PARAMETER if isinstance(base, nn.Parameter) else "a leaf, which its owner holds"
    if x.numel() < MIN_ELEMENTS:
        return SMALL
    if not x.requires_grad:
        return None
    if _is_in_heads(x):
        return HEADS
    node = x.grad_fn
    assert node is not None
    if node.name().startswith("LogSoftmax"):
        return "logarithms of probabilities"
    return PARAMETER if _is_computed_from_parameters(node) else None


def _is_in_heads(x: Tensor) -> bool:
    """Return True for the shapes of queries, keys, values and outputs of attention.

    Backward computes probabilities as ``exp(q k - logsumexp)``, of the logsumexp of exact q and k.
    With rounded q and k, errors grow with the sizes of logits, and reach all layers below.
    """
    return x.ndim > 3 or (x.ndim == 3 and x.shape[-1] <= MAX_HEAD)


def _is_computed_from_parameters(node: Any) -> bool:
    """Return True if the output of ``node`` depends on parameters alone.

    It is a cast of autocast, or computed by a parametrization.
    """
    nodes, visited = [node], 0
    while nodes:
        node = nodes.pop()
        visited += 1
        if visited > _WALK:
            return False
        name = node.name()
        if name == "torch::autograd::AccumulateGrad":
            if not isinstance(node.variable, nn.Parameter):
                return False
            continue
        inputs = [each for each, _ in node.next_functions]
        takes_data = None in inputs and (
            name.startswith(_MATMULS) or isinstance(node, BackwardCFunction)
        )
        if takes_data or name.startswith(_READS_DATA):
            return False
        nodes += [each for each in inputs if each is not None]
    return True
