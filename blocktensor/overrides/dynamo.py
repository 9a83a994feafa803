"""Tell Dynamo which functions of FP8 weights to put into its graph whole, or to break it for.

Otherwise Dynamo would take the casts of a weight for inputs of the graph. Torch functions of a
weight stay whole by themselves. Our functions must be announced, which imports Dynamo: this takes a
second, which only users of ``torch.compile`` should pay.
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
from ..autograd.any_linear import linear
from ..autograd.gated_forms import features_of_h
from ..autograd.linear_cross_entropy import CrossEntropy
from ..recipe import Recipe
from ..tensor.base import FP8Base

_announced = False
_loss_apart: Callable[..., Tensor] = _linear_cross_entropy.linear_cross_entropy
"""The loss function, which breaks graphs once it is announced."""


def announce() -> None:
    """Make Dynamo keep the functions of this file whole."""
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
    """Run :func:`~.gated_mlp.gated_mlp`, or the matmuls in ``linears``, while Dynamo traces.

    ``how``: the further arguments of ``gated_mlp``, from ``offs`` on.
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
    """Compute the loss outside of any graph or, if not announced, from all logits in the graph."""
    if _announced or not is_dynamo_compiling():
        return _loss_apart(x, w, target, bias, loss, chunk, recipe)
    made = F.linear(x, w, bias) if isinstance(w, FP8Base) else linear(x, w, bias, recipe=recipe)
    return loss.of_all(made.float().flatten(0, -2), target.flatten())


def _gated_mlp_whole(x: Tensor, *flat: Any) -> Tensor:
    return _gated_mlp.gated_mlp(x, flat[:3], flat[3:6], *flat[6:])
