"""DTensors with FP8 parts: access (the only reader of ``_local_tensor``), cuts of stacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.formats import BlockFormat, Quantized, ceil_div
from ..tensor.compat.bucket import broadcast, plain_parts
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.refusals import refuse

aten = torch.ops.aten


def local_of(x: Any) -> Tensor | None:
    """Return the local part of a DTensor itself, not an alias; None for other tensors."""
    local: Tensor | None = getattr(x, "_local_tensor", None)
    return local


def with_local(x: Any, local: Tensor) -> Any:
    """Return the DTensor ``x`` with another local part of the same shape."""
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


def check_cuts(
    shape: Sequence[int], mesh: Any, placements: Sequence[Any], format: BlockFormat, what: str
) -> None:
    """Check that no rank would get a part of a block, whose scale several ranks would share.

    Args:
        shape: of the whole stack of experts, ``[E, N, K]`` or ``[E, K, N]``.
        mesh, placements: of the DTensor.
        format: of the weight's casts.
        what: names the stack in the error message.

    Raises:
        NotImplementedError: a cut inside a block, or a placement that neither cuts nor copies.
    """
    sizes = list(shape)
    for index, placement in enumerate(placements):
        ranks = mesh.size(index)
        if placement.is_replicate() or ranks == 1:
            continue
        if not hasattr(placement, "dim"):
            raise NotImplementedError(
                f"{what} {list(shape)} with the placement {placement}: expected Shard(dim) or "
                f"Replicate(), or leave the stack unconverted (skip=[...])"
            )
        dim = placement.dim % len(sizes)
        pieces = getattr(placement, "split_factor", 1)  # of which a rank gets one part each
        part = ceil_div(ceil_div(sizes[dim], pieces), ranks)
        block = 1 if dim == 0 else format.block_shape[dim - 1]
        if part % block and part < sizes[dim]:
            raise NotImplementedError(
                f"{what} {list(shape)} is cut along dimension {dim} into parts of {part}, inside "
                f"blocks of {block} that two ranks would share: cut between experts (Shard(0)) or "
                f"over fewer ranks, or leave the stack unconverted (skip=[...])"
            )
        sizes[dim] = part * pieces


# How distribute_tensor pads and sends the parts of frozen stacks: their bytes and scales


def _plain_parts(x: Tensor, func: Any) -> list[Tensor]:
    """Return :func:`plain_parts` of a frozen stack, and refuse other tensors."""
    if not (isinstance(x, BlockwiseFP8Tensor) and x.format.transposes):
        refuse(func)
    return plain_parts(x)


def _scatter(
    func: Any, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], *args: Any
) -> Any:
    (output,) = outputs
    result = None
    sent = [[_plain_parts(x, func) for x in each] for each in inputs]
    for index, target in enumerate(_plain_parts(output, func)):
        received = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        parts = [[x[index].contiguous() for x in each] for each in sent]
        _, result = func([received], parts, *args)
        result.wait()
        target.copy_(received)
    return outputs, result


def _broadcast(func: Any, tensors: Sequence[Tensor], *args: Any) -> Any:
    (tensor,) = tensors
    return tensors, broadcast(func, _plain_parts(tensor, func), *args)


def _pad(func: Any, x: BlockwiseFP8Tensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    """Append matrices of zeros, as ranks are sent that get fewer."""
    *inside, before, after = pad
    if any(inside) or before or value or x.ndim != 3 or len(pad) != 6 or not x.format.transposes:
        refuse(func)

    def padded(form: Quantized) -> Quantized:
        data = F.pad(form.data.view(torch.uint8), pad).view(form.data.dtype)
        return form._replace(data=data, scale=F.pad(form.scale, pad, value=1.0))

    forms = (None if form is None else padded(form) for form in x.operand)
    shape = x.shape[0] + after, *x.shape[1:]
    return BlockwiseFP8Tensor(
        *forms, shape=shape, strides=x.stride(), dtype=x.dtype, recipe=x.recipe
    )


FROZEN_CUTS: dict[Any, Callable[..., Any]] = {aten.constant_pad_nd.default: _pad}
"""Ops of BlockwiseFP8Tensor."""

if torch.distributed.is_available():
    FROZEN_CUTS[torch.ops.c10d.scatter_.default] = _scatter
    FROZEN_CUTS[torch.ops.c10d.broadcast_.default] = _broadcast
