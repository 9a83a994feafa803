"""Freeze FP8 weights, which drops their high-precision masters, and make them trainable again."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..model.names import is_module
from ..model.weights import Matrix, fp8_weights, frozen_form, kind_of, why_unconvertible
from ..sharding.dtensor import fp8_part, with_local
from ..sharding.fsdp.gather import GatheredInFP8
from ..tensor.compat.swap_in import swap_in
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .checks import swappable
from .state_dict import register_state_hooks


def freeze(model: nn.Module) -> list[str]:
    """Drop the high-precision masters of a model's FP8 weights: 1 byte a weight, no gradient.

    Forward and dgrad keep their bits, since they read the same cast. Other parameters do not
    change: ``model.requires_grad_(False)`` freezes them.

    Returns:
        The names of the linears, and of the stacks of experts, that were frozen.

    Raises:
        ValueError: another module of the model, an embedding say, holds the weight too.
        NotImplementedError: FSDP2 has sharded a weight; freeze the model before ``fully_shard``.
        RuntimeError: an autograd graph or a wrapper such as DDP uses a weight.

    Warns:
        UserWarning: the model has no FP8 weight.
    """
    is_module(model, "freeze")
    return _swap_all(model, "freeze")


def unfreeze(model: nn.Module) -> list[str]:
    """Make a model's frozen FP8 weights trainable, with masters of their present values.

    The first cast of a new master may differ from the frozen bytes by a rounding: a block's amax,
    rounded to the weight's dtype, gives a new scale.

    To train all weights of an FP8 checkpoint in shards, unfreeze the model before it is sharded::

        blocktensor.load_fp8(model, folder)
        blocktensor.unfreeze(model)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)

    Returns:
        The names of the linears, and of the stacks of experts, that are now trainable.

    Raises:
        NotImplementedError: FSDP2 has sharded a weight; unfreeze before ``fully_shard``.
        RuntimeError: an autograd graph or a wrapper such as DDP uses a weight.

    Warns:
        UserWarning: the model has no FP8 weight.
    """
    is_module(model, "unfreeze")
    return _swap_all(model, "unfreeze")


def _swap_all(model: nn.Module, action: str) -> list[str]:
    trains = action == "unfreeze"
    weights = [
        Matrix(name, key, module)
        for name, module in model.named_modules()
        for key in fp8_weights(module)
    ]
    if not weights:
        warnings.warn(
            f"{action} changes nothing: this {kind_of(model)} has no FP8 weight; convert it first "
            f"(blocktensor.convert)",
            stacklevel=3,
        )
    others = {
        id(parameter): kind_of(module)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if key not in fp8_weights(module) or why_unconvertible(module, key) is not None
    }
    for weight in weights:
        _check(weight, action, others.get(id(weight.parameter)))
    names = []
    done: set[int] = set()  # tied weights are swapped once and listed under each name
    for weight in weights:
        old: Any = weight.parameter
        if id(old) not in done and (new := _swapped(weight, trains)) is not None:
            old.grad = None
            swap_in(old, new)
            old.requires_grad_(trains)
            done.add(id(old))
        if id(old) in done:
            names.append(weight.label)
            register_state_hooks(weight.module)
    return names


def _check(weight: Matrix, action: str, other: str | None) -> None:
    """Raise if an FP8 weight cannot be exchanged, or if a module of kind ``other`` reads it."""
    what = f"the weight of {weight.label!r}" if weight.label else "the weight"
    fp8 = fp8_part(weight.parameter)
    is_trained = isinstance(fp8, BlockwiseFP8Weight) and not fp8.is_meta
    # what FSDP2 gathers of a trainable weight is of the frozen kind, but requires a gradient
    looks_gathered = isinstance(fp8, BlockwiseFP8Tensor) and weight.parameter.requires_grad
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if isinstance(fp8, GatheredInFP8) or (looks_gathered and has_ranks):
        raise NotImplementedError(
            f"{what} is sharded by FSDP2 or tensor parallel, and stays trainable or frozen as it "
            f"was: {action} the model before fully_shard and parallelize_module; an FP8 checkpoint "
            f"is loaded before, too (load_fp8, {action}, fully_shard)"
        )
    del fp8  # references to it are counted
    swappable(weight.parameter, what, action)
    if is_trained and action == "freeze" and other is not None:
        raise ValueError(
            f"the weight of {weight.label!r} cannot be frozen, because another module reads its "
            f"values too ({other}): give the linear a copy of its own, or leave it trainable"
        )


def _swapped(weight: Matrix, trains: bool) -> Tensor | None:
    """Return the other kind of an FP8 weight; None if it is of that kind already."""
    held = fp8_part(weight.parameter)
    new: Tensor
    if trains and isinstance(held, BlockwiseFP8Tensor):
        new = BlockwiseFP8Weight(held.dequantize().contiguous(), held.recipe)
    elif not trains and isinstance(held, BlockwiseFP8Weight) and not held.is_meta:
        new = frozen_form(weight.module, weight.key, held.master, held.recipe)
    else:
        return None
    made: Tensor = new if held is weight.parameter else with_local(weight.parameter, new)
    return made
