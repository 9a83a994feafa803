"""The specification of producers: torch's own ops in eager mode, then casts.

Every step is rounded to the dtype of the inputs, as the ops that it names do on this device. So a
producer is exact if a model that uses it computes the same bytes as before. This is also how they
run wherever there is no kernel: the casts are those of ``ops/cast/``, which equal the reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cast import ops
from ..cast.producer import Forms
from ..formats import BlockFormat, Quantized

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An elementwise function as eager mode computes it.

    Attributes:
        value: of the input.
        gradient: of the input, from (that of the value, the input), as autograd computes it.
        is_light: whether a kernel of both gradients has registers left for h.
    """

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    is_light: bool = False


def _relu2_gradient(grad: Tensor, x: Tensor) -> Tensor:
    root = aten.relu(x)
    return aten.threshold_backward(grad * (2 * root), root, 0)


ACTIVATIONS = {
    "silu": Activation(aten.silu, aten.silu_backward, is_light=True),
    "gelu": Activation(aten.gelu, aten.gelu_backward),
    "gelu_tanh": Activation(
        lambda x: aten.gelu(x, approximate="tanh"),
        lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
    ),
    "relu2": Activation(lambda x: aten.relu(x).square(), _relu2_gradient),
}
"""By name; "gelu" is by erf, "relu2" the square of relu."""


def _forms(
    x: Tensor, offs: Tensor | None, rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> Forms:
    if offs is None or columnwise is None:
        return ops.quantize_forms(x, rowwise, columnwise)
    if rowwise is None:
        return None, ops.quantize_grouped_columnwise(x, offs, columnwise)
    return ops.quantize_grouped(x, offs, rowwise, columnwise)


def gated(
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
    offs: Tensor | None = None,
) -> Forms:
    """Return the forms of ``h = activation(gate) * up`` ``[T, I]``.

    Without ``up``, those of the activation. None for a form without a format. With ``offs``,
    columnwise blocks begin anew at groups.
    """
    h = ACTIVATIONS[activation].value(gate)
    return _forms(h if up is None else h * up, offs, rowwise, columnwise)


def gated_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
    offs: Tensor | None = None,
    of_up: bool = True,
) -> tuple[Forms, Forms]:
    """Return the forms of the gradients of ``gate`` and of ``up``, from ``grad``, that of h.

    No forms of the latter without ``up`` or ``of_up``.
    """
    act = ACTIVATIONS[activation]
    if up is None or not of_up:
        of_activation = grad if up is None else grad * up
        return _forms(act.gradient(of_activation, gate), offs, rowwise, columnwise), (None, None)
    d_gate, d_up = gradients(grad, gate, up, activation)
    return _forms(d_gate, offs, rowwise, columnwise), _forms(d_up, offs, rowwise, columnwise)


def joint_gated_backward(
    grad: Tensor,
    gate_up: Tensor,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
    offs: Tensor | None = None,
) -> Forms:
    """Return the forms of the gradient of ``gate_up`` ``[T, 2I]``, gate beside up."""
    gate, up = gate_up.chunk(2, -1)
    both = torch.cat(gradients(grad, gate, up, activation), -1)
    return _forms(both, offs, rowwise, columnwise)


def gated_backward_with_h(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    rowwise: BlockFormat,
    columnwise: BlockFormat,
    h_columnwise: BlockFormat,
) -> tuple[Forms, Forms, Quantized]:
    """Return the results of :func:`gated_backward`, and the columnwise form of :func:`gated`."""
    both = gated_backward(grad, gate, up, activation, rowwise, columnwise)
    _, h = gated(gate, up, activation, None, h_columnwise)
    assert h is not None
    return *both, h


def gradients(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``gate`` and of ``up`` themselves, from ``grad``, that of h."""
    act = ACTIVATIONS[activation]
    return act.gradient(grad * up, gate), grad * act.value(gate)
