"""The local parts of DTensors: the only reader of ``_local_tensor``."""

from __future__ import annotations

from typing import Any

import torch
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


def as_if_cut(local: Tensor) -> Tensor:
    """Return a DTensor with this local part, on a mesh over which nothing can be sent."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    rank = torch.distributed.get_rank()
    mesh = DeviceMesh(local.device.type, [rank, rank + 1], _init_backend=False)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
