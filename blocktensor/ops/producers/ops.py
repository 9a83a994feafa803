"""Define producers: ops that compute a tensor, and store only its casts.

They compute gated activations and their gradients. Nothing is stored in high precision: sources are
read once, and forms are written. The bytes equal eager mode: every step is rounded to the dtype of
the sources, then the result is cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import checks
from ..cast.producer import Forms, empty_forms
from ..formats import BLOCK, BlockFormat
from ..op import op, runner
from ..registry import Backend
from . import reference
from .activations import ActivationName
from .choose_backend import producer_backend


def _check(rowwise: BlockFormat | None, offs: Tensor | None, *sources: Tensor) -> None:
    """Check that kernels would read only the memory of the sources."""
    first = sources[0]
    checks.fit(first.ndim == 2, rowwise is None or rowwise.rows == 1)
    for x in sources:
        checks.fit((x.shape, x.dtype, x.device) == (first.shape, first.dtype, first.device))
    if offs is not None:
        checks.group_ends(offs, first, "gate")


def _backend(
    activation: ActivationName,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
    *sources: Tensor,
) -> Backend[Any]:
    return producer_backend(activation, sources, rowwise, columnwise).backend


@op(
    lambda gate, up, act, row, col, offs: _backend(act, row, col, gate, up),
    check=lambda gate, up, _, row, col, offs: _check(row, offs, gate, up),
    formats=lambda gate, up, _, row, col, offs: (row, col),
)
def gated(
    gate: Tensor,
    up: Tensor,
    activation: ActivationName,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
    offs: Tensor | None = None,
) -> Forms:
    """Return the forms of ``h = activation(gate) * up``, from one read of gate and up.

    The bytes equal eager mode: the activation is rounded to the dtype of ``gate``, then h, then h
    is cast.

    Args:
        gate: ``[T, I]`` bf16, fp16 or fp32, with any strides.
        up: the same.
        activation: a name in ``activations.ACTIVATIONS``.
        rowwise: format of the rowwise form, with blocks of one row; None for no rowwise form.
        columnwise: format of the columnwise form; None for no columnwise form.
        offs: int32 ``[E]``, ends of groups of rows. Columnwise blocks then begin anew in every
            group, as in :func:`~blocktensor.ops.cast.ops.quantize_grouped`.

    Returns:
        The rowwise form, data ``[T, I]``, and the columnwise form, data ``[I, T]``, as
        :func:`~blocktensor.ops.cast.ops.quantize_both` or, in groups, ``quantize_grouped`` writes
        them; None for one without a format.
    """
    return empty_forms(gate, offs, rowwise, columnwise)


@op(
    lambda grad, gate, up, act, row, col, *rest: _backend(act, row, col, grad, gate, up),
    check=lambda grad, gate, up, _, row, col, offs, *rest: _check(row, offs, gate, up, grad),
    formats=lambda grad, gate, up, _, row, col, offs, of_up: (
        (row, col),
        (row, col) if of_up else (None, None),
    ),
)
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
    """Return the forms of the gradients of gate and up, from one read of the gradient of h.

    The bytes equal autograd in eager mode: each product and the activation's gradient are rounded
    to the dtype of ``gate``, then the results are cast. The columnwise form of h itself comes from
    :func:`gated`.

    Args:
        grad: the gradient of h, ``[T, I]``, dtype and device of ``gate``.
        gate, up, activation, rowwise, columnwise, offs: as in :func:`gated`.
        of_up: False for the gradient of gate alone. ``gated(gate, grad, ...)`` gives the forms of
            the gradient of up; computed later, they need less memory at once.

    Returns:
        The forms of the gradient of ``gate``, and of the gradient of ``up`` or (None, None).
    """
    of_gate = empty_forms(gate, offs, rowwise, columnwise)
    if not of_up:
        return of_gate, (None, None)
    return of_gate, empty_forms(gate, offs, rowwise, columnwise)


def _decide_joint(
    grad: Tensor,
    gate_up: Tensor,
    activation: ActivationName,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
    offs: Tensor | None,
) -> Callable[..., Forms]:
    if grad.shape[1] % BLOCK:  # a block has columns of both
        return reference.joint_gated_backward
    backend = _backend(activation, rowwise, columnwise, grad, *gate_up.chunk(2, -1))
    return runner(backend, "joint_gated_backward")


@op(
    decide=_decide_joint,
    check=lambda grad, gate_up, _, row, col, offs: _check(row, offs, grad, *gate_up.chunk(2, -1)),
    formats=lambda grad, gate_up, _, row, col, offs: (row, col),
)
def joint_gated_backward(
    grad: Tensor,
    gate_up: Tensor,
    activation: ActivationName,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
    offs: Tensor | None = None,
) -> Forms:
    """Return the forms of the gradient of ``gate_up``, from one read of ``grad`` and ``gate_up``.

    The bytes equal the gradients of :func:`gated_backward`, concatenated and then cast.

    Args:
        grad: ``[T, I]``, the gradient of ``h = activation(gate) * up``.
        gate_up: ``[T, 2I]``: gate, then up.
        activation, rowwise, columnwise, offs: as in :func:`gated`.

    Returns:
        The rowwise form, data ``[T, 2I]``, and the columnwise form, data ``[2I, T]``.
    """
    return empty_forms(gate_up, offs, rowwise, columnwise)
