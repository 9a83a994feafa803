"""Access DTensors with FP8 parts: only this file reads ``_local_tensor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..patches import STRIDED_SHARDS
from ..tensor.base import FP8Base


def local_of(x: Any) -> Tensor | None:
    """Return the local part of a DTensor itself, not an alias; None for other tensors."""
    local: Tensor | None = getattr(x, "_local_tensor", None)
    return local


def own_part(x: Any) -> Tensor:
    """Return the local part of a DTensor, or a plain tensor itself."""
    local = local_of(x)
    return x if local is None else local


def refuse_descending(mesh: Any) -> None:
    """Refuse a ``DeviceMesh`` whose ranks are not in ascending order.

    torch sorts the ranks of a group, and FSDP2 and DTensor cut by the position in the group.

    Raises:
        NotImplementedError: the ranks of the mesh descend along a dimension.
    """
    if any(bool((mesh.mesh.diff(dim=i) < 0).any()) for i in range(mesh.ndim)):
        raise NotImplementedError(
            f"FP8 weights on a DeviceMesh of the ranks {mesh.mesh.tolist()}, which descend: torch "
            f"cuts tensors in another order than this mesh says. Make one whose ranks ascend along "
            f"each dimension"
        )


def fp8_part(x: Any) -> Any:
    """Return ``x``, or the local part of a DTensor, if it is of an FP8 type; else None."""
    part = own_part(x)
    return part if isinstance(part, FP8Base) else None


def with_local(x: Any, local: Tensor) -> Tensor:
    """Return the DTensor ``x`` with another local part of the same shape."""
    from torch.distributed.tensor import DTensor

    # from_local would take a view of the local part, which is not an FP8Shard
    return DTensor(local, x._spec, requires_grad=False)


def cut_as(
    x: Any, local: Tensor, placements: Sequence[Any], shape: Sequence[int] | None = None
) -> Tensor:
    """Return a plain DTensor on the mesh of ``x``, with ``local`` itself as its local part.

    Args:
        x: a DTensor, whose shape is the default.
        local: a tensor of any dtype, maybe on another device than the mesh.
        placements, shape: of the whole; default: as of ``x``.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    size = torch.Size(x.shape if shape is None else shape)
    strides = torch.empty(size, device="meta").stride()
    spec = DTensorSpec(
        x.device_mesh, tuple(placements), tensor_meta=TensorMeta(size, strides, local.dtype)
    )
    return DTensor(local, spec, requires_grad=False)


def cut_as_experts(x: Tensor, stack: Any, dim: int, pieces: int) -> Tensor:
    """Cut a matrix of thin matrices of all experts, so that each rank gets its experts' parts.

    Args:
        x: the same on all ranks, or on meta; otherwise all get the values of the first rank.
        stack: a DTensor ``[E, ...]`` that is cut between experts, along one dimension of its mesh.
        dim: the dimension of ``x`` along which the experts lie.
        pieces: how often the E experts follow each other along ``dim``: r for ``[r, E]``.
    """
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    STRIDED_SHARDS.apply()
    cut = Shard(dim) if pieces == 1 else _StridedShard(dim, split_factor=pieces)
    placements = [p if p.is_replicate() else cut for p in stack.placements]
    return distribute_tensor(x, stack.device_mesh, placements)


if torch.__version__ < "2.13":  # versions, not texts, are compared

    @STRIDED_SHARDS.around
    def _plan_greedily(theirs: Any, source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        from torch.distributed.tensor._redistribute import get_redistribute_planner

        try:
            return theirs(source, target, *args, **kwargs)
        except ValueError:  # the parts have no order of shards; torch 2.13 goes on so, too
            if not any(hasattr(p, "split_factor") for p in source.placements):
                raise
            planner = get_redistribute_planner(source.device_mesh, source.tensor_meta)
            return planner.generate_greedy_transform_infos(source, target)


def parallel_kind(module: nn.Module) -> str | None:
    """Return ``"colwise"`` or ``"rowwise"`` for a linear layer with one of our styles, else None.

    Dynamo traces this function. It does not import the styles, or DTensor.
    """
    kind: str | None = getattr(module, "_parallel_kind", None)
    return kind


def is_parallel(module: nn.Module) -> bool:
    """Return True for a linear layer with ``ColwiseParallel`` or ``RowwiseParallel``."""
    return parallel_kind(module) is not None


def as_if_cut(local: Tensor) -> Tensor:
    """Return a DTensor with this local part, on a mesh that cannot communicate."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    rank = torch.distributed.get_rank()
    mesh = DeviceMesh(local.device.type, [rank, rank + 1], _init_backend=False)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
