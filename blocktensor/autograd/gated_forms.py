"""Plan a gated MLP, and cast h and gradients in its backward.

The plan holds the plans of the three linear layers and the choices that they share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..ops.cast.producer import Forms
from ..ops.formats import BlockFormat, Quantized
from ..ops.producers.activations import ACTIVATIONS, ActivationName
from ..ops.producers.ops import gated, gated_backward, joint_gated_backward
from ..ops.producers.reference import gradients
from ..recipe import Recipe
from ..tensor.weight import FP8_TYPES
from .matmuls import Dense
from .plan import Plan, difference_of, plan_matmul

LARGE_BYTES = 64 << 20
"""Size of gate from which the gradients of gate and up are made one after the other."""

GATE, UP, DOWN = range(3)
"""Indices of the linear layers. GATE stands for both if one linear layer computes gate and up."""

Formats = tuple[BlockFormat | None, BlockFormat | None]
"""Formats of the rowwise and the columnwise form; None for a form that no matmul reads."""


class GatedPlan(NamedTuple):
    """The checks and choices of one kind of gated MLP.

    Attributes:
        gate, up, down: the plans of its linear layers; no ``up`` if ``gate`` holds both, gate
            first.
        activation: a name in ``ACTIVATIONS``.
        recompute: True to save memory by computing h again.
        saves_h: False if backward makes the columnwise form of h again, from gate and up.
        one_by_one: True if h or a gradient is needed in high precision, or if one of gate and up is
            ``[E, N, K]`` and one ``[E, K, N]``, so that the linear layers run one by one.
        needs_dh: True if the gradient of h will be asked for.
        x_columnwise: the format of x columnwise; None if no matmul reads it.
        dh_formats: the formats of the gradients of gate and up.
        records_forward, records_backward: True if it may run as one recorded sequence of launches.
    """

    gate: Plan
    up: Plan | None
    down: Plan
    activation: ActivationName
    recompute: bool
    saves_h: bool
    one_by_one: bool
    needs_dh: bool
    x_columnwise: BlockFormat | None
    dh_formats: Formats
    records_forward: bool
    records_backward: bool

    @property
    def linears(self) -> tuple[Any, ...]:
        """The plans of gate, up and down."""
        return self[:3]

    @property
    def derives_x(self) -> bool:
        """True if x is FP8, and backward derives the columnwise form that wgrad reads."""
        return self.gate.derives_x or (self.up is not None and self.up.derives_x)

    @property
    def needs_first_dw(self) -> bool:
        """True if gradients of the weights of gate or up may be wanted."""
        return self.gate.needs[1] or (self.up is not None and self.up.needs[1])

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
    recipe: Recipe | None,
) -> GatedPlan:
    """Plan a gated MLP; ``weights`` and ``biases`` belong to gate, up and down.

    Without a weight of up, the weight of gate holds both, gate first.

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
    of_dh = gate.grad_format
    dh_formats = (of_dh if gate.needs[0] else None, of_dh if needs_dw else None)
    records = all(plan.records_backward for plan in (*firsts, down))
    is_cheap = ACTIVATIONS[activation].is_cheap
    makes_h = recompute or (offs is None and up is not None and is_cheap)
    return GatedPlan(
        gate,
        up,
        down,
        activation,
        recompute,
        saves_h=not (needs_dh and makes_h),
        one_by_one=any(plan.plain_wgrad or plan.plain_dgrad for plan in (*firsts, down))
        or firsts[-1].wgrad_input is not gate.wgrad_input,
        needs_dh=needs_dh,
        x_columnwise=next((x.x_columnwise for x in firsts if x.x_columnwise), None),
        dh_formats=dh_formats,
        records_forward=records and all(plan.casts_weight for plan in (*firsts, down)),
        records_backward=records,
    )


def features_of_h(w_gate: Tensor, w_up: Tensor | None, bias_up: Tensor | None = None) -> int:
    """Return the number of features of h, which gate and up must both have.

    Raises:
        ValueError: gate and up have different numbers of features, or there is a bias of up where
            the weight of gate holds both.
    """
    of_gate: int = w_gate.shape[-2]
    if w_up is None:
        if of_gate % 2:
            raise ValueError(
                f"w_gate has {of_gate} features and there is no w_up: expected an even number, "
                f"half for gate and half for up"
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
    if difference := difference_of([w.recipe for w in weights if isinstance(w, FP8_TYPES)]):
        raise ValueError(
            f"mixed recipes: weights of one gated MLP have {difference}: give them one recipe, or "
            f"call functional.linear for each"
        )


def _like_h(x: Tensor, gate: Plan, features: int, leaf: Tensor | None) -> Tensor:
    """Return a stand-in for h, one element that is expanded: the plan of down reads no values.

    ``leaf``: a tensor whose gradient depends on the gradient of h, if there is one.
    """
    one: Any = torch.empty((1,), dtype=gate.out_dtype, device=x.device)
    if leaf is not None and is_dynamo_compiling():  # in torch 2.11, not after requires_grad_()
        one = one + leaf.sum().to(one.dtype)
    h: Tensor = one.expand((*x.shape[:-1], features))
    return h if is_dynamo_compiling() else h.requires_grad_(leaf is not None)


# Casts in backward


def forms_in_backward(
    matmul: Dense,
    plan: GatedPlan,
    sources: list[Any],
    needs_h: bool,
    formats: Formats,
    needs_dbias: Sequence[bool],
    dbiases: list[Tensor | None],
) -> Iterator[tuple[int, Forms]]:
    """Yield the index of a linear layer and the forms that its dgrad and wgrad read, in order.

    The first are the forms of h, if the wgrad of DOWN needs them. Sums of the gradients of gate and
    up go to ``dbiases``, if a bias needs them.

    Args:
        sources: data and scale of h, if saved; gate and up, or both in one and None; the gradient
            of h, if there is one. Each is removed from the list at its last read.
        formats: the formats of the gradients of gate and up.
    """
    data, scale = sources[:2]
    del sources[:2]
    if needs_h:
        format = plan.down.x_columnwise
        assert format is not None
        of_h: list[Forms] = []
        if data is not None:
            assert scale is not None
            of_h.append((None, Quantized(data, scale, format)))
        else:
            both = halves(*sources[:2])
            of_h.append(gated(*both, plan.activation, None, format, matmul.offs))
            del both
        del data, scale
        yield DOWN, of_h.pop()
    if sources[-1] is not None:
        yield from _gradients_of_h(matmul, plan, sources, formats, needs_dbias, dbiases)


def _gradients_of_h(
    matmul: Dense,
    plan: GatedPlan,
    sources: list[Any],
    formats: Formats,
    needs_dbias: Sequence[bool],
    dbiases: list[Tensor | None],
) -> Iterator[tuple[int, Forms]]:
    gate, up, dh = sources
    sources.clear()
    activation, offs = plan.activation, matmul.offs
    of_both: list[Forms]
    if plan.up is None:
        of_both = [_joint_gradient(matmul, plan, dh, gate, formats, needs_dbias[0], dbiases)]
        del gate, dh
        yield GATE, of_both.pop()
        return
    if any(needs_dbias[:2]):  # the sums read the gradients in high precision
        both = gradients(dh, gate, up, activation)
        for i, (of, grad) in enumerate(zip((plan.gate, plan.up), both, strict=True)):
            if needs_dbias[i]:
                dbiases[i] = matmul.dbias(grad, of)
        of_both = [(None, None), (None, None)]
        if formats != (None, None):
            of_both = [matmul.forms(grad, *formats) for grad in both]
        del both, grad
    elif plan.recompute or (plan.saves_h and _is_large(plan, gate, offs)):
        # needs less memory at once, and one more read of dh and gate
        of_both = [gated_backward(dh, gate, up, activation, *formats, offs, False)[0]]
        del up
        yield GATE, of_both.pop()
        of_both = [gated(gate, dh, activation, *formats, offs)]
        del gate, dh
        yield UP, of_both.pop()
        return
    else:
        of_both = [*gated_backward(dh, gate, up, activation, *formats, offs)]
    del gate, up, dh
    for i in (UP, GATE):
        yield i, of_both.pop()


def _is_large(plan: GatedPlan, gate: Tensor, offs: Tensor | None) -> bool:
    # A compiler cannot compare sizes. For rows in groups, a kernel for both gradients is not much
    # faster than one after the other.
    return offs is not None if plan.tracing else gate.numel() * gate.itemsize >= LARGE_BYTES


def _joint_gradient(
    matmul: Dense,
    plan: GatedPlan,
    dh: Tensor,
    gate_up: Tensor,
    formats: Formats,
    needs_dbias: bool,
    dbiases: list[Tensor | None],
) -> Forms:
    """Return the forms of the gradient of ``[T, 2I]``; put its sum, if needed, into ``dbiases``."""
    if not needs_dbias:
        return joint_gated_backward(dh, gate_up, plan.activation, *formats, matmul.offs)
    grad = torch.cat(gradients(dh, *halves(gate_up, None), plan.activation), -1)
    dbiases[0] = matmul.dbias(grad, plan.gate)
    return (None, None) if formats == (None, None) else matmul.forms(grad, *formats)


def halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return gate and up; without ``up``, the halves of ``gate``."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    return gate, up
