"""The differentiable gated activation, whose result exists in FP8 alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..ops.producers.ops import ActivationName, gated
from ..ops.producers.reference import ACTIVATIONS, gradients
from ..recipe import DEFAULT_RECIPE, Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from .backward import FP8Function, Gradients, run_backward
from .quantize import quantize


def gated_activation(
    gate: Tensor,
    up: Tensor,
    activation: ActivationName = "silu",
    recipe: Recipe = DEFAULT_RECIPE,
) -> BlockwiseFP8Tensor:
    """Run :func:`blocktensor.functional.gated_activation`."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    if gate.shape != up.shape or gate.ndim == 0:
        raise ValueError(
            f"gate has shape {list(gate.shape)} and up {list(up.shape)}: expected the same [..., I]"
        )
    if recipe.wgrad_input_format is None:
        return quantize(ACTIVATIONS[activation].value(gate) * up, recipe)
    made: BlockwiseFP8Tensor = _GatedActivation.apply(gate, up, activation, recipe)
    return made


class _GatedActivation(FP8Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, gate: Tensor, up: Tensor, activation: ActivationName, recipe: Recipe
    ) -> BlockwiseFP8Tensor:
        formats = recipe.activation_format, recipe.wgrad_input_format
        features = gate.shape[-1]
        forms = gated(gate.reshape(-1, features), up.reshape(-1, features), activation, *formats)
        ctx.save_for_backward(gate, up)
        ctx.activation = activation  # type: ignore[attr-defined]
        return BlockwiseFP8Tensor(*forms, shape=gate.shape, dtype=gate.dtype, recipe=recipe)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return run_backward(ctx, grads, _gradients, ())


def _gradients(ctx: Any, saved: list[Any], grads: list[Any], asked: list[bool]) -> Gradients:
    """Return the gradients of the arguments of :meth:`_GatedActivation.forward`."""
    gate, up = saved
    return *gradients(grads.pop(), gate, up, ctx.activation), None, None
