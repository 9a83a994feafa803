"""Freezing of FP8 weights, which drops their high-precision masters, and its inverse."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ..recipe import Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.swap_in import swap_in
from ..tensor.weight import BlockwiseFP8Weight
from .state_dict import register_state_hooks


def frozen_form(weight: Tensor, recipe: Recipe) -> BlockwiseFP8Tensor:
    """The FP8 form of a high-precision weight, without the master."""
    return BlockwiseFP8Tensor.cast(weight.detach(), recipe.weight_format, recipe)


def freeze(model: nn.Module) -> list[str]:
    """Drop the high-precision masters of a model's FP8 linears: 1 byte a weight, no gradient.

    Forward and dgrad keep their bits, since they read the same cast.

    Returns:
        The names of the modules whose weights were frozen.

    Raises:
        RuntimeError: an autograd graph or a wrapper such as DDP uses a weight.
    """

    def frozen(weight: Tensor) -> Tensor | None:
        if not isinstance(weight, BlockwiseFP8Weight) or weight.is_meta:
            return None
        return frozen_form(weight.master, weight.recipe)

    return _swap_all(model, frozen, trains=False)


def unfreeze(model: nn.Module) -> list[str]:
    """Make a model's frozen FP8 linears trainable, with masters of their present values.

    The first cast of a new master may differ from the frozen bytes by a rounding: a block's amax,
    rounded to the weight's dtype, gives a new scale.

    Returns:
        The names of the modules whose weights are now trainable.

    Raises:
        RuntimeError: an autograd graph or a wrapper such as DDP uses a weight.
    """

    def trainable(weight: Tensor) -> Tensor | None:
        if not isinstance(weight, BlockwiseFP8Tensor):
            return None
        return BlockwiseFP8Weight(weight.dequantize(), weight.recipe)

    return _swap_all(model, trainable, trains=True)


def _swap_all(
    model: nn.Module, swapped: Callable[[Tensor], Tensor | None], trains: bool
) -> list[str]:
    names = []
    done: set[int] = set()  # tied weights are swapped once and listed under each name
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        weight = module.weight
        new = None if id(weight) in done else swapped(weight)
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
