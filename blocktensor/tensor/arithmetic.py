"""Distinguish arithmetic on the values of weights from matmuls of layers, which run in FP8.

Optimizers, merges of adapters, initializations and callbacks also multiply weights: rotations,
projections, norms. Their results are written to weights, or read as numbers. They are computed in
the precision of the masters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..ops.runtime.specialize import PLAIN
from .base import MasterBase
from .torch_internals.callers import in_torch_func, layer_runs


def is_arithmetic(factors: Sequence[Tensor]) -> bool:
    """Return True if a matmul of these is arithmetic on values of weights, not part of a layer.

    It is if

    - all FP8 factors have masters, and all others are plain;
    - autograd records nothing, or the weights are detached: peft merges the rotations of adapters,
      whose gradients are recorded, into ``weight.data``;
    - no layer runs, or all factors are weights. Compilers and ``torch.func`` do not know if a layer
      runs: while they do, only matmuls of weights alone are arithmetic.
    """
    weights = [x for x in factors if isinstance(x, MasterBase)]
    if not weights or not all(type(x) in PLAIN or isinstance(x, MasterBase) for x in factors):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in factors)
        if is_recorded and not all(_is_detached(x) for x in weights):
            return False
    return len(weights) == len(factors) or not (is_compiling() or layer_runs() or in_torch_func())


def _is_detached(weight: MasterBase) -> bool:
    """Return True unless ``weight`` is a parameter, a view of one, or computed from one."""
    whole = weight if weight._base is None else weight._base
    return not (weight.requires_grad or isinstance(whole, nn.Parameter))
