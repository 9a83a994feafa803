"""Compare frozen sharded weights between ranks: each rank multiplies by its own scales.

The bytes that FSDP2 gathers come from all ranks. If ranks had read other checkpoints, each would
compute with another model, without an error.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import Any

import torch
from torch import Tensor

from ..ranks import agree
from .fsdp_internals import ShardedParam, by_group, sharded_with

_COMPARED: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Tensor], int]]
_COMPARED = weakref.WeakKeyDictionary()
"""The scales that were compared last and their version, by FSDP's own object for a weight."""


def compare_frozen(owner: Any) -> None:
    """Compare a frozen weight, and those that FSDP knows with it, unless its scales are known.

    Args:
        owner: FSDP's object for the weight; None before FSDP has one.

    Raises:
        RuntimeError: ranks hold other weights, recipes or scales.
    """
    if owner is None or _is_compared(owner):
        return
    together, _ = sharded_with(owner)
    for weights in by_group(x for x in together if _scale_of(x.local) is not None):
        agree("frozen sharded FP8 weights", [_line(x, x.local) for x in weights], weights[0].group)
        for weight in weights:
            _COMPARED[weight.owner()] = _state_of(weight.local)


def _scale_of(local: Any) -> Tensor | None:
    """Return the scales of a frozen weight's part; None for other parameters."""
    return getattr(local, "scale", None)


def _is_compared(owner: Any) -> bool:
    scale, version = _COMPARED.get(owner, (None, 0))
    present = owner._sharded_local_tensor
    return scale is not None and scale() is present.scale and version == _state_of(present)[1]


def _state_of(local: Any) -> tuple[weakref.ref[Tensor], int]:
    """Return a reference to the scales of a frozen weight's part, and their version."""
    scale = local.scale
    return weakref.ref(scale), 0 if scale.is_inference() else scale._version


def _line(weight: ShardedParam, local: Any) -> str:
    digest = "none"
    if not local.scale.is_meta:
        values = local.scale.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(values).hexdigest()[:16]
    return f"{weight}, frozen, {local.recipe}, scales with the digest {digest}"
