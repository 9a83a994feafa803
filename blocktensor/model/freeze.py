"""Freezing of FP8 weights, which drops their high-precision masters, and its inverse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.dtensor import local_of
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.swap_in import swap_in
from ..tensor.weight import BlockwiseFP8Weight
from .conversion_checks import swappable
from .holders import needs_values
from .linears import fp8_part, frozen_form, is_linear
from .state_dict import register_state_hooks


def freeze(model: nn.Module) -> list[str]:
    """Drop the high-precision masters of a model's FP8 linears: 1 byte a weight, no gradient.

    Forward and dgrad keep their bits, since they read the same cast. A ``main_grad`` is dropped.

    Returns:
        The names of the modules whose weights were frozen.

    Raises:
        ValueError: another module, an embedding say, holds the weight too.
        NotImplementedError: FSDP2 has sharded a weight; freeze the model before ``fully_shard``.
        RuntimeError: an autograd graph or a wrapper such as DDP uses a weight.
    """

    def frozen(linear: nn.Module, weight: Tensor) -> Tensor | None:
        if not isinstance(weight, BlockwiseFP8Weight) or weight.is_meta:
            return None
        return frozen_form(linear, weight.master, weight.recipe)

    return _swap_all(model, frozen, trains=False)


def unfreeze(model: nn.Module) -> list[str]:
    """Make a model's frozen FP8 linears trainable, with masters of their present values.

    The first cast of a new master may differ from the frozen bytes by a rounding: a block's amax,
    rounded to the weight's dtype, gives a new scale.

    Returns:
        The names of the modules whose weights are now trainable.

    Raises:
        NotImplementedError: FSDP2 has sharded a weight; unfreeze before ``fully_shard``.
        RuntimeError: an autograd graph or a wrapper such as DDP uses a weight.
    """

    def trainable(linear: nn.Module, weight: Tensor) -> Tensor | None:
        if not isinstance(weight, BlockwiseFP8Tensor):
            return None
        return BlockwiseFP8Weight(weight.dequantize().contiguous(), weight.recipe)

    return _swap_all(model, trainable, trains=True)


def _swap_all(
    model: nn.Module, swapped: Callable[[nn.Module, Tensor], Tensor | None], trains: bool
) -> list[str]:
    linears = [(name, module) for name, module in model.named_modules() if is_linear(module)]
    users = Counter(id(module.weight) for _, module in linears)
    for name, module in linears:
        _check(name, module)
        if not trains:
            _check_holders(name, module, users[id(module.weight)])
    names = []
    done: set[int] = set()  # tied weights are swapped once and listed under each name
    for name, module in linears:
        weight: Any = module.weight
        new = None if id(weight) in done else swapped(module, weight)
        if new is not None:
            weight.grad = None
            swap_in(weight, new)
            weight.requires_grad_(trains)
            done.add(id(weight))
        if id(weight) in done:
            names.append(name)
            register_state_hooks(module)
    return names


def _check(name: str, linear: nn.Module) -> None:
    """Raise if the FP8 weight of a linear cannot be exchanged."""
    weight: Any = linear.weight
    if fp8_part(weight) is None:
        return
    what = f"the weight of {name!r}" if name else "the weight"
    # what FSDP2 gathers of a trainable weight is of the frozen kind, but requires a gradient
    looks_gathered = isinstance(weight, BlockwiseFP8Tensor) and weight.requires_grad
    if local_of(weight) is not None or (looks_gathered and _has_ranks()):
        raise NotImplementedError(
            f"{what} is sharded by FSDP2, under which it stays trainable or frozen as it was: "
            f"freeze or unfreeze the model before fully_shard"
        )
    swappable(weight, what)


def _check_holders(name: str, linear: nn.Module, linears: int) -> None:
    """Raise if another module needs the master of a weight that is to be frozen."""
    if not isinstance(linear.weight, BlockwiseFP8Weight) or linear.weight.is_meta:
        return
    holder = needs_values(linear, linears)
    if holder is not None:
        raise ValueError(
            f"the weight of {name!r} cannot be frozen, because another module reads its values too "
            f"({holder}): give the linear a copy of its own, or leave it trainable"
        )


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
