"""The local parts of DTensors: the only reader of ``_local_tensor``."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def local_of(x: Any) -> Tensor | None:
    """The local part of a DTensor itself, not an alias; None for other tensors."""
    local: Tensor | None = getattr(x, "_local_tensor", None)
    return local


def with_local(x: Any, local: Tensor) -> Any:
    """The DTensor ``x`` with another local part of the same shape."""
    from torch.distributed.tensor import DTensor

    # from_local would take a view of the local part, which is not an FP8Shard
    return DTensor(local, x._spec, requires_grad=False)
