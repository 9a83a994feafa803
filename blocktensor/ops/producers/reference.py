"""Specify producers: torch's own ops in eager mode, then casts.

Every op rounds to the dtype of the inputs, as it does on this device. So a producer is exact if a
model that uses it computes the same bytes as before. This file also runs where there is no kernel:
it calls the casts of ``ops/cast/``, which equal the reference's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cast import ops
from ..cast.producer import Forms
from ..formats import BlockFormat
from .activations import ACTIVATIONS, ActivationName


def _forms(
    x: Tensor, offs: Tensor | None, rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> Forms:
    if offs is None:
        return ops.quantize_forms(x, rowwise, columnwise)
    return ops.quantize_grouped(x, offs, rowwise, columnwise)


def gated(
    gate: Tensor,
    up: Tensor,
    activation: ActivationName,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
    offs: Tensor | None = None,
) -> Forms:
    """Return the forms of ``h = activation(gate) * up`` ``[T, I]``.

    A form without a format is None. With ``offs``, columnwise blocks begin anew in every group.
    """
    return _forms(ACTIVATIONS[activation].value(gate) * up, offs, rowwise, columnwise)


def gated_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: ActivationName,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
    offs: Tensor | None = None,
    of_up: bool = True,
) -> tuple[Forms, Forms]:
    """Return the forms of the gradients of ``gate`` and ``up``, from the gradient of h.

    Without ``of_up``, there are no forms of the gradient of ``up``.
    """
    if not of_up:
        d_gate = ACTIVATIONS[activation].gradient(grad * up, gate)
        return _forms(d_gate, offs, rowwise, columnwise), (None, None)
    d_gate, d_up = gradients(grad, gate, up, activation)
    return _forms(d_gate, offs, rowwise, columnwise), _forms(d_up, offs, rowwise, columnwise)


def joint_gated_backward(
    grad: Tensor,
    gate_up: Tensor,
    activation: ActivationName,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
    offs: Tensor | None = None,
) -> Forms:
    """Return the forms of the gradient of ``gate_up`` ``[T, 2I]``, which is gate, then up."""
    gate, up = gate_up.chunk(2, -1)
    both = torch.cat(gradients(grad, gate, up, activation), -1)
    return _forms(both, offs, rowwise, columnwise)


def gradients(
    grad: Tensor, gate: Tensor, up: Tensor, activation: ActivationName
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``gate`` and ``up`` in high precision, from the gradient of h."""
    act = ACTIVATIONS[activation]
    return act.gradient(grad * up, gate), grad * act.value(gate)
