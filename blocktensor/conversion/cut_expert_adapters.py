"""Cut peft's adapters of expert stacks between ranks, as the stacks are cut.

peft makes matrices ``A[E r, in]`` and ``B[out, r E]`` of all experts. If each rank holds some
experts of the stack, a DTensor, the matrices become DTensors too: a rank holds the rows of A and
the columns of B that belong to its experts. It trains what it multiplies by, its optimizer holds
nothing else, and ``full_tensor()`` returns the matrices that peft writes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..patches import ADAPTERS_OF_CUT_EXPERTS
from ..sharding.dtensor import cut_as_experts, fp8_part, local_of
from ..sharding.fsdp.shards import FP8Shard, FrozenShard


def check_cut(weight: Any, name: str) -> None:
    """Check that ranks hold whole experts of an FP8 stack.

    Args:
        weight: a DTensor with an FP8 part.
        name: of the parameter.

    Raises:
        NotImplementedError: FSDP2 has cut the stack and has not gathered it, or ranks hold parts of
            experts, or not equally many experts.
    """
    if isinstance(fp8_part(weight), (FP8Shard, FrozenShard)):
        raise NotImplementedError(
            f"an adapter of {name!r} {list(weight.shape)}, FP8 weights that FSDP2 has cut: call "
            f"get_peft_model on a new model before fully_shard, and fully_shard on a module "
            f"around the adapter, so that both are gathered before the forward"
        )
    cuts = [i for i, x in enumerate(weight.placements) if not x.is_replicate()]
    sizes = [weight.device_mesh.size(i) for i in cuts]
    is_whole = len(cuts) == 1 and _is_between_experts(weight.placements[cuts[0]])
    if not is_whole or weight.shape[0] % sizes[0]:
        raise NotImplementedError(
            f"an adapter of {name!r} {list(weight.shape)}, FP8 experts that {sizes} ranks have cut "
            f"by {list(weight.placements)}: expected whole experts, equally many on each rank "
            f"(Shard(0) along one dimension of the mesh); for other cuts adapt linear layers "
            f"alone (target_modules)"
        )


def _is_between_experts(placement: Any) -> bool:
    return getattr(placement, "dim", None) == 0 and not hasattr(placement, "split_factor")


def thin_matrices(wrapper: Any, adapter: str, experts: int) -> tuple[Tensor, Tensor]:
    """Return A ``[E, r, in]`` and B ``[out, r, E]`` of the experts on this rank.

    Args:
        wrapper: peft's ``ParamWrapper``.
        adapter: its name.
        experts: E, of the stack on this rank.

    Raises:
        NotImplementedError: the matrices belong to other experts.
    """
    a, b = (_local(x[adapter].weight) for x in (wrapper.lora_A, wrapper.lora_B))
    rows = experts * wrapper.r[adapter]
    if a.shape[0] != rows or b.shape[1] != rows:
        raise NotImplementedError(
            f"an adapter of rank {wrapper.r[adapter]} of {wrapper.parameter_name!r} has matrices "
            f"{list(a.shape)} and {list(b.shape)} on this rank, which has {experts} experts: "
            f"expected {rows} rows and columns. Cut the experts before get_peft_model, and call "
            f"fully_shard after it, on a module around the adapter"
        )
    return a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts))


def _local(x: Any) -> Tensor:
    """Return the local part of a DTensor, differentiably; a plain tensor itself."""
    made: Tensor = x if local_of(x) is None else x.to_local()
    return made


@ADAPTERS_OF_CUT_EXPERTS.around
def _update_layer(theirs: Any, wrapper: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    weight = wrapper.get_param()
    part = fp8_part(weight)
    is_cut = part is not None and part is not weight
    if is_cut:
        check_cut(weight, wrapper.parameter_name)
    theirs(wrapper, adapter_name, *args, **kwargs)
    if is_cut:
        _cut(wrapper.lora_A[adapter_name], weight, 0)
        _cut(wrapper.lora_B[adapter_name], weight, 1, wrapper.r[adapter_name])


def _cut(linear: nn.Linear, stack: Any, dim: int, pieces: int = 1) -> None:
    """Cut the weight of one of peft's layers, which has the values of the first rank then."""
    weight = linear.weight
    cut = cut_as_experts(weight.detach(), stack, dim, pieces)
    linear.weight = nn.Parameter(cut, requires_grad=weight.requires_grad)
