"""Functions of FP8 weights that Dynamo puts into its graph as they are, without looking inside.

It would read the casts that a weight makes as inputs of the graph. The torch functions of a weight
stay whole by themselves; ours have to be announced, which imports Dynamo: a second that only those
who compile should spend.
"""

from __future__ import annotations

import functools
import sys

import torch.nn.functional as F
from torch import Tensor

from ..ops.producers.ops import ActivationName
from ..ops.producers.reference import ACTIVATIONS
from . import gated_mlp as _gated_mlp

_announced = False


def announce() -> None:
    """Let Dynamo take the functions of this file whole."""
    global _announced
    if not _announced:
        from torch.compiler import allow_in_graph

        allow_in_graph(_gated_mlp_whole)
        _announced = True


def announce_if_loaded() -> None:
    """:func:`announce`, unless that would import Dynamo."""
    if not _announced and "torch._dynamo" in sys.modules:
        announce()


def gated_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    bias_gate: Tensor | None,
    bias_up: Tensor | None,
    bias_down: Tensor | None,
    activation: ActivationName,
    recompute: bool,
) -> Tensor:
    """``gated_mlp.gated_mlp`` while Dynamo traces; linear by linear before it was announced."""
    if _announced:
        weights, biases = (w_gate, w_up, w_down), (bias_gate, bias_up, bias_down)
        return _gated_mlp_whole(x, *weights, *biases, activation, recompute)
    gate, up = F.linear(x, w_gate, bias_gate), F.linear(x, w_up, bias_up)
    return F.linear(ACTIVATIONS[activation].value(gate) * up, w_down, bias_down)


@functools.wraps(_gated_mlp.gated_mlp)
def _gated_mlp_whole(*args: object) -> Tensor:
    made: Tensor = _gated_mlp.gated_mlp(*args)  # type: ignore[arg-type]
    return made
