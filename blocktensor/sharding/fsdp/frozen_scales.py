"""Compare frozen sharded weights between ranks: each rank multiplies by its own scales.

The bytes that FSDP2 gathers come from all ranks. If ranks had read other checkpoints, each would
compute with another model, without an error.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import Any, cast

import torch
from torch import Tensor

from ..ranks import agree
from .fsdp_internals import ShardedParam, sharded_with

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
    by_group: dict[str, list[ShardedParam]] = {}
    for weight in together:
        if scale_of(weight) is not None:
            by_group.setdefault(weight.group.group_name, []).append(weight)
    for weights in by_group.values():
        agree("frozen sharded FP8 weights", list(map(_line, weights)), weights[0].group)
        for weight in weights:
            if (scale := scale_of(weight)) is not None:
                _COMPARED[weight.owner()] = weakref.ref(scale), _version(scale)


def scale_of(weight: ShardedParam) -> Tensor | None:
    """Return the scales of a frozen weight; None for other parameters."""
    return getattr(weight.local, "scale", None)


def _is_compared(owner: Any) -> bool:
    scale, version = _COMPARED.get(owner, (None, 0))
    present: Tensor = owner._sharded_local_tensor.scale
    return scale is not None and scale() is present and version == _version(present)


def _version(scale: Tensor) -> int:
    return 0 if scale.is_inference() else scale._version


def _line(weight: ShardedParam) -> str:
    scale, local = scale_of(weight), cast(Any, weight.local)
    assert scale is not None
    digest = "none"
    if not scale.is_meta:
        values = scale.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(values).hexdigest()[:16]
    return (
        f"{weight.name} {list(weight.shape)} sharded on dim {weight.dim}, frozen, {local.recipe}, "
        f"scales with the digest {digest}"
    )
