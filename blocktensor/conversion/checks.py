"""Check a weight before it is converted: each check raises with a remedy, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.nn.parameter import is_lazy

from ..model.matrix import Matrix, Share
from ..model.weights import is_fully_sharded
from ..ops import checks
from ..recipe import MIGRATING, Recipe
from ..sharding.cuts import UNCONVERTED, check_on_grid
from ..sharding.fsdp.fsdp_internals import Sharding, sharding_of
from ..tensor.compat.swap_in import check_swappable
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight

_OURS = {
    "module_filter_fn": "filter=, a function of the same arguments (module, name)",
    "filter_fn": "filter=, a function of the same arguments (module, name)",
    "config": "recipe=, a blocktensor.Recipe",
}
"""Arguments of ``convert`` for the arguments of torchao's functions."""


def refuse_others(others: Mapping[str, object]) -> None:
    """Raise TypeError for arguments that ``convert`` does not have."""
    for name in others:
        if name in _OURS:
            raise TypeError(
                f"convert() has no argument {name!r}, which is torchao's: pass {_OURS[name]}; "
                f"{MIGRATING} compares the two libraries"
            )
        raise TypeError(f"convert() got an unexpected keyword argument {name!r}")


def check_not_fake(parameters: Iterable[Tensor]) -> None:
    """Raise NotImplementedError if a parameter is fake, or a FakeTensorMode is on."""
    if detect_fake_mode(list(parameters)) is not None:
        raise NotImplementedError(
            "cannot convert under FakeTensorMode, which keeps weak references to parameters, so "
            "that none can change in place: convert the model before entering the mode, or build "
            "it with torch.device('meta')"
        )


def check_castable(
    matrix: Matrix, what: str, recipe: Recipe | None, modules: Iterable[nn.Module]
) -> None:
    """Raise unless a parameter can become FP8 in place, or take another recipe.

    Args:
        matrix: a parameter of a linear layer or of experts.
        what: names it in the error message.
        recipe: the one that is asked for.
        modules: its module, and the modules known to be above it.

    Raises:
        ValueError: it has no shape yet; it is frozen in FP8, or sharded, with another recipe.
        TypeError: it is not bf16, fp16 or fp32.
        NotImplementedError: a frozen DTensor, or one that another tensor parallel style has made;
            FSDP2 has gathered it.
        RuntimeError: an autograd graph or a wrapper such as DDP uses it.
    """
    weight = matrix.parameter
    if is_lazy(weight):
        raise ValueError(
            f"{what} has no shape yet (nn.LazyLinear): run a batch through the model first, then "
            f"convert it"
        )
    fp8 = matrix.fp8
    if fp8 is not None:
        _check_castable_again(fp8, what, recipe)
    checks.high_precision_dtype(weight, what)
    share = matrix.share
    if share is not None:
        _check_dtensor(matrix, share, what)
    elif fp8 is None and any(is_fully_sharded(type(module)) for module in modules):
        raise NotImplementedError(
            f"{what} is no DTensor though FSDP2 shards its module: FSDP2 has gathered it, or was "
            f"told to ignore it; convert the model before fully_shard"
        )
    check_swappable(weight, what)


def _check_castable_again(fp8: Any, what: str, recipe: Recipe | None) -> None:
    """Raise if a weight in FP8 has no master on this rank that could be cast again."""
    if isinstance(fp8, BlockwiseFP8Weight):
        return
    assert recipe is not None  # else it would not change
    names = [
        x.name for x in fields(recipe) if getattr(recipe, x.name) != getattr(fp8.recipe, x.name)
    ]
    old, new = (", ".join(f"{x}={getattr(r, x)!r}" for x in names) for r in (fp8.recipe, recipe))
    reason, remedy = "is sharded in FP8", "convert before fully_shard"
    if isinstance(fp8, BlockwiseFP8Tensor):
        reason = "is frozen in FP8, without its high-precision values"
        remedy = "convert the original weights, or unfreeze(model) first, to cast the FP8 values"
    raise ValueError(
        f"{what} {reason}: it was cast with {old} and cannot be cast with {new}; {remedy}, or "
        f"call without a recipe, which leaves alone what is FP8 already"
    )


def _check_dtensor(matrix: Matrix, share: Share, what: str) -> None:
    """Raise unless matmuls read the DTensor in FP8, by FSDP2, our styles, or as whole experts."""
    weight: Any = matrix.parameter
    if matrix.is_parallel:
        if share.owner is not None:
            raise NotImplementedError(
                f"{what} is a tensor parallel DTensor {list(weight.shape)} that FSDP2 shards "
                f"besides: convert the model before fully_shard"
            )
    else:
        fsdp = sharding_of(share.owner)
        if fsdp is None and weight.ndim == 3:  # each rank multiplies by its part
            check_on_grid(weight.shape, weight.device_mesh, weight.placements, what, UNCONVERTED)
            return
        _check_fsdp(weight, fsdp, what)
    if matrix.is_frozen:
        raise NotImplementedError(
            f"{what} is a frozen DTensor {list(weight.shape)}, which cannot be converted: "
            f"convert the model before fully_shard and parallelize_module, or with "
            f"requires_grad=True"
        )


def _check_fsdp(weight: Any, fsdp: Sharding | None, what: str) -> None:
    """Raise unless FSDP2 made the DTensor, of whole experts or weights, and has not gathered it."""
    dims = [x.dim for x in weight.placements if not x.is_replicate()]
    # without replicas, FSDP2 alone shards over one dimension of its mesh
    if fsdp is None or (len(dims) > 1 and not _cut_between_experts(weight, dims, fsdp)):
        remedy = (
            "DTensor would compute its gradient in high precision; give ColwiseParallel or "
            "RowwiseParallel of blocktensor.distributed to parallelize_module, before fully_shard, "
            "or skip it"
        )
        if weight.ndim == 3:
            remedy = "convert stacks that are cut inside experts before fully_shard"
        raise NotImplementedError(
            f"{what} is a DTensor {list(weight.shape)} with placements {weight.placements} that "
            f"FSDP2 alone did not make: {remedy}"
        )
    if fsdp.has_run:
        raise NotImplementedError(
            f"{what} is a DTensor {list(weight.shape)} that FSDP2 has gathered in high precision "
            f"already: convert the model before its first forward"
        )


def _cut_between_experts(weight: Tensor, dims: list[int], fsdp: Sharding) -> bool:
    """Return True if EP has cut a stack between experts only, before FSDP2 sharded it.

    ``dims``: the dimensions along which it is cut, FSDP2's own among them.
    """
    return weight.ndim == 3 and sorted(dims) == sorted([fsdp.dim, *[0] * (len(dims) - 1)])
