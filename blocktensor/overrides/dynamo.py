"""Functions of FP8 weights that Dynamo puts into its graph as they are, or breaks the graph for.

It would read the casts that a weight makes as inputs of the graph. The torch functions of a weight
stay whole by themselves; ours have to be announced, which imports Dynamo: a second that only those
who compile should spend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..autograd import gated_mlp as _gated_mlp
from ..autograd import linear_cross_entropy as _linear_cross_entropy
from ..autograd.gated_forms import features_of_h
from ..autograd.linear import linear
from ..autograd.linear_cross_entropy import CrossEntropy
from ..recipe import Recipe
from ..tensor.base import FP8Base

_announced = False
_loss_apart: Callable[..., Tensor] = _linear_cross_entropy.linear_cross_entropy
"""Breaks a graph, once it is announced."""


def announce() -> None:
    """Let Dynamo take the functions of this file whole."""
    global _announced, _loss_apart
    if not _announced:
        from torch.compiler import allow_in_graph, disable

        allow_in_graph(_gated_mlp_whole)
        _loss_apart = disable(_linear_cross_entropy.linear_cross_entropy)
        _announced = True


def announce_if_loaded() -> None:
    """Call :func:`announce`, unless that would import Dynamo."""
    if not _announced and "torch._dynamo" in sys.modules:
        announce()


def gated_mlp(
    linears: Callable[..., Sequence[Tensor]], x: Tensor, weights: Any, biases: Any, *how: Any
) -> Tensor:
    """Run :func:`~.gated_mlp.gated_mlp` while Dynamo traces, or its ``linears``.

    ``how``: its other arguments, from ``offs`` on.
    """
    if _announced:
        return _gated_mlp_whole(x, *weights, *biases, *how)
    features_of_h(weights[0], weights[1], biases[1])
    return _gated_mlp.one_by_one(linears, x, weights, biases, how[1])


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None,
    loss: CrossEntropy,
    chunk: int | None,
    recipe: Recipe | None,
) -> Tensor:
    """Compute the loss outside of any graph; in it, from all logits, if not announced."""
    if _announced or not is_dynamo_compiling():
        return _loss_apart(x, w, target, bias, loss, chunk, recipe)
    made = F.linear(x, w, bias) if isinstance(w, FP8Base) else linear(x, w, bias, recipe=recipe)
    return loss.of_all(made.float().flatten(0, -2), target.flatten())


def _gated_mlp_whole(x: Tensor, *flat: Any) -> Tensor:
    return _gated_mlp.gated_mlp(x, flat[:3], flat[3:6], *flat[6:])
