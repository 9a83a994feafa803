"""Freezing of FP8 weights, which drops their high-precision masters, and its inverse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.dtensor import with_local
from ..distributed.fsdp.gather import GatheredInFP8
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.swap_in import swap_in
from ..tensor.weight import BlockwiseFP8Weight
from .conversion_checks import swappable
from .holders import needs_values
from .linears import fp8_part
from .module_names import is_module
from .product_weights import fp8_weights, frozen_form, label_of
from .state_dict import register_state_hooks


def freeze(model: nn.Module) -> list[str]:
    """Drop the high-precision masters of a model's FP8 weights: 1 byte a weight, no gradient.

    Forward and dgrad keep their bits, since they read the same cast. A ``main_grad`` is dropped.

    Returns:
        The names of the linears, and of the stacks of experts, that were frozen.

    Raises:
        ValueError: another module, an embedding say, holds the weight too.
        NotImplementedError: FSDP2 has sharded a weight; freeze the model before ``fully_shard``.
        RuntimeError: an autograd graph or a wrapper such as DDP uses a weight.
    """
    is_module(model, "freeze")

    def frozen(module: nn.Module, key: str, weight: Tensor) -> Tensor | None:
        if not isinstance(weight, BlockwiseFP8Weight) or weight.is_meta:
            return None
        return frozen_form(module, key, weight.master, weight.recipe)

    return _swap_all(model, frozen, trains=False)


def unfreeze(model: nn.Module) -> list[str]:
    """Make a model's frozen FP8 weights trainable, with masters of their present values.

    The first cast of a new master may differ from the frozen bytes by a rounding: a block's amax,
    rounded to the weight's dtype, gives a new scale.

    Returns:
        The names of the linears, and of the stacks of experts, that are now trainable.

    Raises:
        NotImplementedError: FSDP2 has sharded a weight; unfreeze before ``fully_shard``.
        RuntimeError: an autograd graph or a wrapper such as DDP uses a weight.
    """
    is_module(model, "unfreeze")

    def trainable(module: nn.Module, key: str, weight: Tensor) -> Tensor | None:
        if not isinstance(weight, BlockwiseFP8Tensor):
            return None
        return BlockwiseFP8Weight(weight.dequantize().contiguous(), weight.recipe)

    return _swap_all(model, trainable, trains=True)


def _swap_all(
    model: nn.Module, swapped: Callable[[nn.Module, str, Tensor], Tensor | None], trains: bool
) -> list[str]:
    weights = [
        (label_of(name, key), module, key)
        for name, module in model.named_modules()
        for key in fp8_weights(module)
    ]
    users = Counter(id(module._parameters[key]) for _, module, key in weights)
    for label, module, key in weights:
        _check(label, module, key)
        if not trains:
            _check_holders(label, module, key, users[id(module._parameters[key])])
    names = []
    done: set[int] = set()  # tied weights are swapped once and listed under each name
    for label, module, key in weights:
        weight: Any = module._parameters[key]
        held = fp8_part(weight)
        new = None if id(weight) in done else swapped(module, key, held)
        if new is not None:
            new = new if held is weight else with_local(weight, new)
            weight.grad = None
            swap_in(weight, new)
            weight.requires_grad_(trains)
            done.add(id(weight))
        if id(weight) in done:
            names.append(label)
            register_state_hooks(module)
    return names


def _check(label: str, module: nn.Module, key: str) -> None:
    """Raise if an FP8 weight cannot be exchanged."""
    weight: Any = module._parameters[key]
    fp8 = fp8_part(weight)
    if fp8 is None:
        return
    what = f"the weight of {label!r}" if label else "the weight"
    # what FSDP2 gathers of a trainable weight is of the frozen kind, but requires a gradient
    looks_gathered = isinstance(fp8, BlockwiseFP8Tensor) and weight.requires_grad
    if isinstance(fp8, GatheredInFP8) or (looks_gathered and _has_ranks()):
        raise NotImplementedError(
            f"{what} is sharded by FSDP2 or tensor parallel, and stays trainable or frozen as it "
            f"was: freeze or unfreeze the model before fully_shard and parallelize_module"
        )
    swappable(weight, what)


def _check_holders(label: str, module: nn.Module, key: str, known: int) -> None:
    """Raise if another module needs the master of a weight that is to be frozen."""
    weight: Any = module._parameters[key]
    if not isinstance(fp8_part(weight), BlockwiseFP8Weight) or weight.is_meta:
        return
    del weight  # references to it are counted
    holder = needs_values(module, known, key)
    if holder is not None:
        raise ValueError(
            f"the weight of {label!r} cannot be frozen, because another module reads its values "
            f"too ({holder}): give the linear a copy of its own, or leave it trainable"
        )


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
