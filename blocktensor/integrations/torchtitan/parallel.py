"""torchtitan's tensor parallel, with the FP8 matmuls and gathers of ``blocktensor.distributed``.

torchtitan cuts every module as its ``_sharding_config`` says. Linear layers in FP8 are cut here
before, and lose that config: DTensor would compute their weight gradients in high precision.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.protocols.sharding import resolve_placements

from ...sharding.dtensor import fp8_part, is_parallel
from ...tensor_parallel.prepare_input import PrepareModuleInput
from ...tensor_parallel.styles import ColwiseParallel, RowwiseParallel, cut_parameter


def cut_linears(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the FP8 linear layers of a torchtitan model between tensor parallel ranks.

    Modules that pass one input to several of them (q, k, v; gate, up) gather it in FP8, once.

    Args:
        model: before ``Module.parallelize``, which cuts all other modules.
        mesh: of one dimension, ``"tp"``.

    Raises:
        NotImplementedError: a linear layer that cannot be cut so; the error names it.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and fp8_part(module.weight) is not None:
            try:
                _cut(module, mesh)
            except NotImplementedError as error:
                raise NotImplementedError(
                    f"{name!r}: {error}; leave it in high precision, with filter_fqns=[{name!r}], "
                    f"or set another --parallelism.tensor_parallel_degree"
                ) from error
    for module in model.modules():
        if isinstance(module, (GQAttention, FeedForward)):
            _gather_in_fp8(module, mesh)


def _cut(module: Any, mesh: DeviceMesh) -> None:
    config = module._sharding_config
    if config is None:
        raise NotImplementedError("a linear layer for which torchtitan has no sharding config")
    (of_weight,) = resolve_placements(config.state_shardings["weight"], mesh)
    if of_weight == Replicate():
        module.weight = nn.Parameter(cut_parameter(module.weight, mesh, of_weight, 0))
        module.forward = MethodType(_run_on_own_tokens, module)
        return
    style, dim = (RowwiseParallel, 1) if of_weight == Shard(1) else (ColwiseParallel, 0)
    size = module.weight.shape[dim] // mesh.size()
    block = module.weight.recipe.weight_format.block_shape[dim]
    if size % block:
        raise NotImplementedError(
            f"a weight {list(module.weight.shape)} that {mesh.size()} ranks cut into parts of "
            f"{size}, inside blocks of {block}, and that FSDP2 shards too"
        )
    made = config.out_dst_shardings or config.out_src_shardings
    (output,) = resolve_placements(made, mesh)
    style(output_layouts=output, use_local_output=False)._apply(module, mesh)
    module._sharding_config = None


def _run_on_own_tokens(module: nn.Linear, input: Tensor) -> Tensor:
    """Run a linear layer whose weight every rank has whole, on this rank's part of the input."""
    parameters: list[Any] = [module.weight, module.bias]
    if not isinstance(input, DTensor):
        return F.linear(input, *parameters)  # DTensor refuses a plain input
    mesh, (layout,) = input.device_mesh, input.placements
    if layout in (Shard(-1), Shard(input.ndim - 1)) or layout.is_partial():
        raise NotImplementedError(
            f"the input {list(input.shape)} of a linear layer whose weight every rank has whole "
            f"is {layout}: expected whole tokens"
        )
    whole: Placement = Replicate() if layout.is_replicate() else Partial()
    local: list[Any] = [
        None if x is None else x.to_local(grad_placements=[whole]) for x in parameters
    ]
    y = F.linear(input.to_local(), *local)
    return DTensor.from_local(y, mesh, [layout], run_check=False)


def _gather_in_fp8(module: Any, mesh: DeviceMesh) -> None:
    """Cast and gather the input of a module once if all its linear layers are cut in FP8."""
    linears = [each for each in module.modules() if isinstance(each, nn.Linear)]
    config = module._sharding_config
    if config is None or config.state_shardings or not all(map(is_parallel, linears)):
        return
    (name,) = config.in_src_shardings
    (given,) = resolve_placements(config.in_src_shardings[name], mesh)
    # the other arguments (masks, positions) stay as they are
    others = [None] * (len(module._cache_pos_arg_names()) - 1)
    PrepareModuleInput(
        input_layouts=(given, *others), desired_input_layouts=(Replicate(), *others)
    )._apply(module, mesh)
    module._sharding_config = None
