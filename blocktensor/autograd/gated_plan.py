"""The checks and choices of a gated MLP: those of its three linears, and what they share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..ops.formats import BlockFormat
from ..ops.producers.ops import ActivationName, is_from_one_read
from ..ops.producers.reference import ACTIVATIONS
from ..recipe import Recipe
from .plan import FP8_TYPES, Plan, plan_matmul

Formats = tuple[BlockFormat | None, BlockFormat | None]
"""Of a rowwise and of a columnwise form; None for one that no product reads."""


class GatedPlan(NamedTuple):
    """How one gated MLP runs.

    Attributes:
        gate, up, down: its linears; no ``up`` if ``gate`` holds both, gate first.
        activation: a name in ``ACTIVATIONS``.
        recompute: whether backward makes the columnwise form of h again.
        store_fp8: whether gate and up are saved in FP8.
        h_beside: whether backward makes the columnwise form of h beside the gradients of gate and
            up, at no read of its own.
        one_by_one: True if h or a gradient is needed in high precision, so that the linears run one
            by one.
        needs_dh: whether the gradient of h will be asked for.
        x_columnwise: the format of x columnwise; None where no product reads it.
        dh_formats: of the gradients of gate and up.
    """

    gate: Plan
    up: Plan | None
    down: Plan
    activation: ActivationName
    recompute: bool
    store_fp8: bool
    h_beside: bool
    one_by_one: bool
    needs_dh: bool
    x_columnwise: BlockFormat | None
    dh_formats: Formats

    @property
    def tracing(self) -> bool:
        """True while a compiler traces."""
        return self.gate.tracing or self.down.tracing or (self.up is not None and self.up.tracing)


def plan_gated(
    offs: Tensor | None,
    x: Tensor,
    weights: tuple[Tensor, Tensor | None, Tensor],
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    activation: ActivationName,
    recompute: bool,
    store_fp8: bool,
    recipe: Recipe | None,
) -> GatedPlan:
    """Plan a gated MLP; ``weights`` and ``biases`` belong to gate, up and down.

    Without a weight of up, that of gate holds both, gate first.

    Raises:
        TypeError, ValueError: an unknown activation; dtypes, shapes, devices or recipes that do not
            fit together.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    w_gate, w_up, w_down = weights
    _check_weights(weights)
    gate = plan_matmul(x, w_gate, biases[0], recipe, offs)
    up = None if w_up is None else plan_matmul(x, w_up, biases[1], recipe, offs)
    features = features_of_h(w_gate, w_up, biases[1])
    differentiable: tuple[Tensor | None, ...] = x, w_gate, w_up, *biases[:2]
    of_h = [t for t in differentiable if t is not None and t.requires_grad]
    needs_dh = torch.is_grad_enabled() and len(of_h) > 0
    h = _like_h(x, gate, features, of_h[0] if needs_dh else None)
    down = plan_matmul(h, w_down, biases[2], recipe, offs)
    firsts = [gate] if up is None else [gate, up]
    needs_dw = any(plan.needs[1] for plan in firsts)
    dh_formats = (gate.format if gate.needs[0] else None, gate.format if needs_dw else None)
    h_beside = (
        not (recompute or store_fp8)
        and offs is None
        and up is not None
        and None not in dh_formats
        and down.x_columnwise is not None
        and not any(bias is not None and bias.requires_grad for bias in biases[:2])
        and is_from_one_read(activation, gate.out_dtype, features)
    )
    return GatedPlan(
        gate,
        up,
        down,
        activation,
        recompute,
        store_fp8,
        h_beside,
        one_by_one=any(plan.saves_x for plan in (*firsts, down)),
        needs_dh=needs_dh,
        x_columnwise=next((x.x_columnwise for x in firsts if x.x_columnwise), None),
        dh_formats=dh_formats,
    )


def features_of_h(w_gate: Tensor, w_up: Tensor | None, bias_up: Tensor | None = None) -> int:
    """Return the number of features of gate, which is that of up.

    Raises:
        ValueError: they have not as many each; a bias of up where the weight of gate holds both.
    """
    of_gate: int = w_gate.shape[-2]
    if w_up is None:
        if of_gate % 2:
            raise ValueError(
                f"w_gate has {of_gate} features and there is no w_up: expected an even number, "
                f"those of gate and as many of up"
            )
        if bias_up is not None:
            raise ValueError("bias_up without w_up: give bias_gate the biases of both, gate first")
        return of_gate // 2
    of_up = w_up.shape[-2]
    if of_gate != of_up:
        raise ValueError(f"gate has {of_gate} features and up {of_up}: expected the same number")
    return of_gate


def _check_weights(weights: tuple[Tensor, Tensor | None, Tensor]) -> None:
    w_gate, _, w_down = weights
    for name, w in (("w_gate", w_gate), ("w_down", w_down)):
        if not isinstance(w, Tensor):
            raise TypeError(
                f"{name} is a {type(w).__name__}: expected a tensor (w_up alone may be None, where "
                f"w_gate holds gate and up)"
            )
    recipes = [w.recipe for w in weights if isinstance(w, FP8_TYPES)]
    for name in ("scale", "wgrad_input"):
        chosen = list(dict.fromkeys(getattr(recipe, name) for recipe in recipes))
        if len(chosen) > 1:
            raise ValueError(
                f"mixed recipes: weights of one gated MLP have {name}={chosen[0]!r} and "
                f"{chosen[1]!r}: give them one recipe, or call functional.linear for each"
            )


def _like_h(x: Tensor, gate: Plan, features: int, leaf: Tensor | None) -> Tensor:
    """Return one element expanded to the shape of h, for the plan of down, which reads no values.

    ``leaf``: a tensor that needs a gradient of h, if there is one.
    """
    one: Any = torch.empty((1,), dtype=gate.out_dtype, device=x.device)
    if leaf is not None and is_dynamo_compiling():  # torch 2.11's follows no requires_grad_()
        one = one + leaf.sum().to(one.dtype)
    h: Tensor = one.expand((*x.shape[:-1], features))
    return h if is_dynamo_compiling() else h.requires_grad_(leaf is not None)
