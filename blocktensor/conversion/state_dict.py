"""Register hooks that save and load plain tensors, as if the module was not converted.

A frozen weight is an FP8 tensor in ``state_dict``. ``torch.distributed.checkpoint`` can cut and
join plain tensors alone: ``get_model_state_dict`` gets a frozen weight as a dict of two,
``{"data": e4m3, "scale": fp32}``, which share its memory, so that ``load`` writes into the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..model.matrix import Matrix
from ..ops import checks
from ..ops.checks import HIGH_PRECISION
from ..patches import PARAMETER_REGISTRATION
from ..sharding.cuts import frozen_like, frozen_parts, held
from ..sharding.dtensor import fp8_part, local_of, own_part, with_local
from ..sharding.fsdp.shards import FP8Shard, FrozenShard
from ..tensor.base import MasterBase
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.torch_internals.callers import loads_state, saves_parts
from ..tensor.weight import BlockwiseFP8Weight


def register_state_hooks(module: nn.Module) -> None:
    """Make ``state_dict`` hold the master, and ``load_state_dict(assign=True)`` keep the FP8 type.

    Without ``assign`` a loaded tensor is copied: into the master, which needs no hook, or into a
    frozen weight, for which it is cast.
    """
    if _plain_parts not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_plain_parts)
        module.register_load_state_dict_pre_hook(_wrap_loaded_weights)


def _join(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    """Register the hooks of a module that gets an FP8 weight, for example from another module."""
    part = fp8_part(parameter)
    if part is not None:
        register_state_hooks(module)
    is_frozen = isinstance(part, (BlockwiseFP8Tensor, FrozenShard))
    if is_frozen and parameter is not None and parameter.requires_grad and loads_state():
        # torch gives it the requires_grad of the plain parameter that it replaces
        parameter.requires_grad_(False)
        warnings.warn(
            "load_state_dict(assign=True) puts frozen FP8 weights in the place of trainable "
            "parameters: they stay frozen. Call blocktensor.unfreeze(model) to train them, or "
            "model.requires_grad_(False) before the load, which then does not warn",
            stacklevel=2,
        )


# Process-wide, because a module that takes an FP8 weight later (``b.weight = a.weight``) was not
# converted itself, and ``load_state_dict(assign=True)`` would put a plain parameter in its place:
# torch asks neither the old parameter nor any other global hook before it does.
@PARAMETER_REGISTRATION.made_by
def _join_all() -> None:
    register_module_parameter_registration_hook(_join)


def _plain_parts(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace FP8 parts by plain ones; whole weights come plain (``overrides/by_caller.py``)."""
    for name, parameter in module._parameters.items():
        value = state.get(f"{prefix}{name}")
        local = local_of(value)
        if isinstance(local, MasterBase) and value is not parameter:  # keep_vars=True
            state[f"{prefix}{name}"] = with_local(value, local.master)
        elif _is_frozen(value) and saves_parts():
            state[f"{prefix}{name}"] = _parts(f"{prefix}{name}", value)


def _wrap_loaded_weights(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    for name, weight in module._parameters.items():
        value = state.get(f"{prefix}{name}")
        if weight is None or value is None:
            continue
        if isinstance(value, Mapping):
            value = state[f"{prefix}{name}"] = _joined(f"{prefix}{name}", weight, value)
        if metadata.get("assign_to_params_buffers"):
            wrapped = _wrapped(Matrix("", name, module), value)
            if wrapped is not None:
                state[f"{prefix}{name}"] = nn.Parameter(wrapped, requires_grad=weight.requires_grad)
        elif isinstance(weight, BlockwiseFP8Tensor) and _is_plain_value(value, weight):
            state[f"{prefix}{name}"] = Matrix("", name, module).frozen_form(value, weight.recipe)


_PARTS = "data", "scale"
"""Keys of the parts of a frozen weight, and suffixes of their names in a checkpoint."""


def _is_frozen(weight: Any) -> bool:
    """Return True for a weight that :func:`frozen_parts` accepts."""
    part = fp8_part(weight)
    return isinstance(part, FrozenShard) or (
        isinstance(part, BlockwiseFP8Tensor) and part.format.transposes
    )


def _parts(name: str, weight: Any) -> dict[str, Tensor]:
    """Return the parts of a frozen weight for a checkpoint.

    Raises:
        NotImplementedError: a rank holds several pieces of the weight.
    """
    parts = dict(zip(_PARTS, frozen_parts(weight), strict=True))
    if len(held(weight).regions) > 1:
        raise NotImplementedError(
            f"{name} is cut by {weight.placements}, which gives a rank several pieces; "
            f"torch.distributed.checkpoint can save one piece a rank: use blocktensor.save_fp8 and "
            f"load_fp8"
        )
    return parts


def _joined(name: str, weight: Tensor, parts: Mapping[str, Any]) -> Tensor:
    """Return the frozen weight that consists of loaded parts.

    Raises:
        ValueError: ``weight`` is not frozen, is cut in another way, or has a recipe that the
            scales do not fit.
    """
    if not _is_frozen(weight):
        raise ValueError(
            f"{name} is loaded as the bytes and scales of a frozen FP8 weight, and the model's is "
            f"not frozen: blocktensor.freeze the model before it is sharded and loaded"
        )
    expected = dict(zip(_PARTS, frozen_parts(weight), strict=True))
    got, want = ({k: _layout(x) for k, x in each.items()} for each in (parts, expected))
    if got != want:
        raise ValueError(
            f"{name} is loaded in parts {got}, expected {want}: give "
            f"torch.distributed.checkpoint.load the get_model_state_dict of this model to fill"
        )
    recipe, scale = fp8_part(weight).recipe, own_part(parts["scale"])
    problem = None if scale.is_meta else checks.bad_scale(scale, recipe.weight_format)
    if problem is not None:
        raise ValueError(f"{name}: {problem}; freeze the model with the recipe of the checkpoint")
    return frozen_like(weight, own_part(parts["data"]), scale, recipe)


def _layout(x: Any) -> list[Any]:
    """Return the facts of a part that must agree before a load."""
    return [getattr(x, name, None) for name in ("shape", "dtype", "placements")]


def _is_plain_value(value: Any, weight: Tensor) -> bool:
    is_plain = isinstance(value, Tensor) and fp8_part(value) is None and local_of(value) is None
    return is_plain and value.shape == weight.shape and value.dtype in HIGH_PRECISION


def _wrapped(matrix: Matrix, value: Any) -> Any:
    """Return a plain tensor in the FP8 type of the weight that it will replace; else None."""
    if (part := matrix.shared_stack) is None:
        return _wrapped_as(matrix, matrix.parameter, value)
    local = local_of(value)
    if local is None:
        return _wrapped_as(matrix, part, value)
    wrapped = _wrapped_as(matrix, part, local)
    return None if wrapped is None else with_local(value, wrapped)


def _wrapped_as(matrix: Matrix, weight: Any, value: Any) -> Any:
    """Return ``value`` in the FP8 type of ``weight``: the parameter, or its part on this rank."""
    if isinstance(weight, BlockwiseFP8Weight) and not isinstance(value, BlockwiseFP8Weight):
        if isinstance(value, BlockwiseFP8Tensor):
            if not weight.requires_grad:
                return value
            value = value.dequantize().contiguous()
        return BlockwiseFP8Weight(value.detach(), weight.recipe)
    if isinstance(weight, BlockwiseFP8Tensor) and fp8_part(value) is None:
        return matrix.frozen_form(value, weight.recipe)
    own, local = local_of(weight), local_of(value)
    if isinstance(own, (FP8Shard, BlockwiseFP8Weight)) and not isinstance(local, MasterBase):
        assert local is not None
        return with_local(value, type(own)(local.detach(), own.recipe))
    return None


torch.serialization.add_safe_globals([_plain_parts, _wrap_loaded_weights])  # parts of whole models
