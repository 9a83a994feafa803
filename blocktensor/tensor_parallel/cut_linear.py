"""The parameters of a linear, cut between the ranks of a mesh: DTensors of FP8 local parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from ..ops.formats import Quantized
from ..ops.scale_layouts import laid_out
from ..sharding.dtensor import local_of, with_local
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight


def cut_linear(module: nn.Linear, mesh: DeviceMesh, dim: int, src_data_rank: int | None) -> None:
    """Replace the parameters of a linear by DTensors of which each rank holds its part.

    Args:
        module: the linear.
        mesh: of one dimension.
        dim: 0 cuts the outputs of the weight, and the bias; 1 cuts the inputs.
        src_data_rank: the rank of the mesh whose values all ranks take; None: each takes its own.

    Raises:
        ValueError: the mesh has several dimensions; a parameter is a DTensor already.
        NotImplementedError: the module is not a plain ``nn.Linear``; the cuts of an FP8 weight do
            not lie between blocks.
    """
    _check(module, mesh, dim)
    placements: dict[str, Placement] = {
        "weight": Shard(dim),
        "bias": Shard(0) if dim == 0 else Replicate(),
    }
    cut = {
        name: _cut(parameter, mesh, placements[name], src_data_rank)
        for name, parameter in module.named_parameters(recurse=False)
    }
    for name, made in cut.items():
        needs_grad = getattr(module, name).requires_grad
        module.register_parameter(name, nn.Parameter(made, requires_grad=needs_grad))


def _check(module: nn.Linear, mesh: DeviceMesh, dim: int) -> None:
    kind = type(module).__name__
    if mesh.ndim != 1:
        raise ValueError(
            f"tensor parallel of a {kind} on a mesh of {mesh.ndim} dimensions: pass one of them, "
            f'e.g. mesh["tp"]'
        )
    if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        raise NotImplementedError(
            f"tensor parallel of a {kind} with a forward of its own, which would not run: "
            f"parallelize the nn.Linear that it calls, and each linear once"
        )
    if set(module._parameters) - {"weight", "bias"} or module._parameters.get("weight") is None:
        raise NotImplementedError(
            f"tensor parallel of a {kind} with the parameters {sorted(module._parameters)}: "
            f"expected a weight and a bias; remove parametrizations before"
        )
    for name, parameter in module.named_parameters(recurse=False):
        if local_of(parameter) is not None:
            raise ValueError(
                f"the {name} of this {kind} is a DTensor already: call parallelize_module before "
                f"fully_shard, and once for each linear"
            )
    check_even(module.weight, mesh, dim)


def check_even(weight: Tensor, mesh: DeviceMesh, dim: int) -> None:
    """Check that ranks can hold equal parts of a weight ``[N, K]``, and a frozen one in blocks.

    Raises:
        NotImplementedError: they cannot.
    """
    ranks, size = mesh.size(), weight.shape[dim]
    edge, kind = 1, "a"
    if isinstance(weight, BlockwiseFP8Tensor):
        edge, kind = weight.block_shape[dim], "a frozen FP8"
    if size % (ranks * edge):
        what = "outputs" if dim == 0 else "inputs"
        raise NotImplementedError(
            f"{kind} weight {list(weight.shape)} whose {size} {what} are cut between {ranks} "
            f"ranks: expected a multiple of {ranks * edge}; leave this linear out of the plan of "
            f"parallelize_module, or use fewer ranks"
        )


def _cut(
    parameter: Tensor, mesh: DeviceMesh, placement: Placement, src_data_rank: int | None
) -> Tensor:
    def cut(x: Tensor) -> Tensor:
        return distribute_tensor(x.detach(), mesh, [placement], src_data_rank=src_data_rank)

    if isinstance(parameter, BlockwiseFP8Weight):
        made = cut(parameter.master)
        return _wrapped(made, BlockwiseFP8Weight(_owned(made), parameter.recipe))
    if isinstance(parameter, BlockwiseFP8Tensor):
        data, scale, format = parameter.rowwise()
        as_bytes, scales = cut(data.view(torch.uint8)), cut(scale)
        part = laid_out(_owned(as_bytes).view(format.dtype), _owned(scales), format)
        local = BlockwiseFP8Tensor(
            Quantized(*part),
            None,
            shape=part.data.shape,
            dtype=parameter.dtype,
            recipe=parameter.recipe,
        )
        like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return _wrapped(distribute_tensor(like, mesh, [placement], src_data_rank=None), local)
    return cut(parameter)


def _wrapped(x: Tensor, local: Tensor) -> Tensor:
    made: Tensor = with_local(x, local)
    return made


def _owned(x: Tensor) -> Tensor:
    """Return the local part of a DTensor, contiguous and in its own memory."""
    local = local_of(x)
    assert local is not None
    is_whole = local.untyped_storage().nbytes() == local.nbytes
    return (
        local
        if is_whole and local.is_contiguous()
        else local.clone(memory_format=torch.contiguous_format)
    )
