"""Freezing of FP8 weights, which drops their high-precision masters, and its inverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.dtensor import local_of
from ..recipe import Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.swap_in import swap_in
from ..tensor.weight import BlockwiseFP8Weight
from .conversion_checks import swappable
from .linears import fp8_part, is_conv1d, is_linear
from .state_dict import register_state_hooks


def frozen_form(linear: nn.Module, master: Tensor, recipe: Recipe) -> BlockwiseFP8Tensor:
    """The FP8 form of a linear's high-precision weight, without the master.

    It holds the bytes that the forward reads: for a Conv1D, whose weight is ``[K, N]``, those of
    the columnwise form.
    """
    weight, format = master.detach(), recipe.weight_format
    if not is_conv1d(linear):
        return BlockwiseFP8Tensor.cast(weight, format, recipe)
    fp8 = BlockwiseFP8Tensor.cast(weight.t().contiguous(), format, recipe)
    return fp8.relabel(shape=weight.shape, strides=weight.stride(), transpose=True)


def freeze(model: nn.Module) -> list[str]:
    """Drop the high-precision masters of a model's FP8 linears: 1 byte a weight, no gradient.

    Forward and dgrad keep their bits, since they read the same cast.

    Returns:
        The names of the modules whose weights were frozen.

    Raises:
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
    for name, module in linears:
        _check(name, module)
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
            if trains:
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


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
