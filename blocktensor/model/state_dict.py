"""Hooks with which a converted module saves and loads plain tensors, as if not converted."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..distributed.dtensor import local_of, with_local
from ..distributed.fsdp.trainable import FP8Shard, shard_of
from ..tensor.weight import BlockwiseFP8Weight


def register_state_hooks(module: nn.Module) -> None:
    """Make ``state_dict`` hold the master, and ``load_state_dict(assign=True)`` keep the FP8 type.

    Without ``assign`` a loaded tensor is copied into the master, which needs no hook.
    """
    if _plain_weight not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_plain_weight)
        module.register_load_state_dict_pre_hook(_wrap_assigned_weight)


def _plain_weight(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    value = state.get(f"{prefix}weight")
    if value is module.weight:  # keep_vars=True
        return
    if isinstance(value, BlockwiseFP8Weight):
        state[f"{prefix}weight"] = value.master
    elif (shard := shard_of(value)) is not None:
        state[f"{prefix}weight"] = with_local(value, shard.master)


def _wrap_assigned_weight(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    weight: Any = module.weight
    value = state.get(f"{prefix}weight")
    if not metadata.get("assign_to_params_buffers") or value is None:
        return
    wrapped: Any = None
    if isinstance(weight, BlockwiseFP8Weight) and not isinstance(value, BlockwiseFP8Weight):
        wrapped = BlockwiseFP8Weight(value.detach(), weight.recipe)
    elif (shard := shard_of(weight)) is not None and shard_of(value) is None:
        local = local_of(value)
        assert local is not None
        wrapped = with_local(value, FP8Shard(local.detach(), shard.recipe))
    if wrapped is not None:
        state[f"{prefix}weight"] = nn.Parameter(wrapped, requires_grad=weight.requires_grad)
