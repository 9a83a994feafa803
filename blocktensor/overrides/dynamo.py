"""Functions of FP8 weights that Dynamo puts into its graph as they are, or breaks the graph for.

It would read the casts that a weight makes as inputs of the graph. The torch functions of a weight
stay whole by themselves; ours have to be announced, which imports Dynamo: a second that only those
who compile should spend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..autograd import gated_mlp as _gated_mlp
from ..autograd import linear_cross_entropy as _linear_cross_entropy
from ..autograd import quantize as _quantize
from ..autograd.gated_forms import features_of_h
from ..autograd.linear import linear
from ..autograd.linear_cross_entropy import CrossEntropy
from ..ops.norm.reference import NormKind
from ..ops.norm.reference import rms_norm as eager_norm
from ..ops.producers.ops import ActivationName
from ..ops.producers.reference import ACTIVATIONS
from ..recipe import Recipe
from ..tensor.base import FP8Base
from ..tensor.fp8_tensor import BlockwiseFP8Tensor

_announced = False
_loss_apart: Callable[..., Tensor] = _linear_cross_entropy.linear_cross_entropy
"""Breaks a graph, once it is announced."""


def announce() -> None:
    """Let Dynamo take the functions of this file whole."""
    global _announced, _loss_apart
    if not _announced:
        from torch.compiler import allow_in_graph, disable

        for function in _WHOLE:
            allow_in_graph(function)
        _loss_apart = disable(_linear_cross_entropy.linear_cross_entropy)
        _announced = True


def announce_if_loaded() -> None:
    """Call :func:`announce`, unless that would import Dynamo."""
    if not _announced and "torch._dynamo" in sys.modules:
        announce()


def gated_mlp(
    x: Tensor,
    weights: tuple[Tensor, Tensor | None, Tensor],
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    offs: Tensor | None,
    activation: ActivationName,
    recompute: bool,
    store_fp8: bool,
) -> Tensor:
    """Run the gated MLP while Dynamo traces, or one matmul at a time; with ``offs`` of experts."""
    if _announced:
        options = activation, recompute, store_fp8
        return _gated_mlp_whole(x, *weights, *biases, *options, None, offs)

    def linears(x: Tensor, ws: Sequence[Tensor], bs: Sequence[Tensor | None]) -> Sequence[Tensor]:
        if offs is not None:
            return [torch._grouped_mm(x, w.transpose(1, 2), offs) for w in ws]
        return [F.linear(x, w, b) for w, b in zip(ws, bs, strict=True)]

    features_of_h(*weights[:2], biases[1])
    return _gated_mlp.one_by_one(linears, x, weights, biases, activation)


def gated_activation(
    gate: Tensor, up: Tensor, activation: ActivationName, recipe: Recipe
) -> BlockwiseFP8Tensor:
    """Run the gated activation while Dynamo traces, or op by op."""
    if _announced:
        return _gated_activation_whole(gate, up, activation, *_fields(recipe))
    return _quantize.quantize(ACTIVATIONS[activation].value(gate) * up, recipe)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, kind: NormKind, recipe: Recipe
) -> BlockwiseFP8Tensor:
    """Run the RMS norm while Dynamo traces, or op by op."""
    if _announced:
        return _rms_norm_whole(x, weight, eps, kind, *_fields(recipe))
    return _quantize.quantize(eager_norm(x, weight, eps, kind), recipe)


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


# Graphs hold no recipe, but its fields


def _fields(recipe: Recipe) -> tuple[Any, ...]:
    # dataclasses.astuple makes deep copies in Python 3.10, which Dynamo cannot trace
    return recipe.scale, recipe.cache_weight, recipe.wgrad_input, recipe.batch_invariant


def _gated_mlp_whole(*args: Any) -> Tensor:
    return _gated_mlp.gated_mlp(*args)


def _gated_activation_whole(
    gate: Tensor, up: Tensor, activation: ActivationName, *recipe: Any
) -> BlockwiseFP8Tensor:
    return _quantize.gated_activation(gate, up, activation, Recipe(*recipe))


def _rms_norm_whole(
    x: Tensor, weight: Tensor, eps: float, kind: NormKind, *recipe: Any
) -> BlockwiseFP8Tensor:
    return _quantize.rms_norm(x, weight, eps, kind, Recipe(*recipe))


_WHOLE = _gated_mlp_whole, _gated_activation_whole, _rms_norm_whole
