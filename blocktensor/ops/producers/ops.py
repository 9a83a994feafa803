"""Gated activations and their gradients, cast: the functions to call, and their registered ops.

As in ``cast/ops.py``, a function runs its decision directly unless it must go through the
dispatcher. Nothing high-precision is stored: sources are read once, and forms written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from .. import checks
from ..cast.producer import Forms
from ..formats import BLOCK, BlockFormat
from ..runtime.specialize import Specialized, recorded
from . import reference
from .choose_backend import producer_kernels
from .op_forms import check_formats, empty_forms, format_named, forms_of, name_of, tensors_of
from .reference import ACTIVATIONS

ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu2"]


def gated(
    gate: Tensor,
    up: Tensor | None,
    activation: ActivationName,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
    offs: Tensor | None = None,
) -> Forms:
    """The forms of ``h = activation(gate) * up``, from one read of gate and up.

    Bytes are those of eager mode: the activation is rounded to the dtype of ``gate``, then h, then
    h is cast.

    Args:
        gate: ``[T, I]`` bf16, fp16 or fp32, with any strides.
        up: alike; None for ``h = activation(gate)``.
        activation: "silu", "gelu" (by erf), "gelu_tanh" or "relu2" (the square of relu).
        rowwise: format of the rowwise form, of blocks of one row; None for no such form.
        columnwise: format of the columnwise form; None for no such form.
        offs: int32 ``[E]``, ends of groups of rows. Columnwise blocks then begin anew at groups,
            as those of :func:`~blocktensor.ops.cast.grouped_ops.quantize_grouped`.

    Returns:
        The rowwise form, data ``[T, I]``, and the columnwise form, data ``[I, T]`` as
        :func:`~blocktensor.ops.cast.ops.quantize_columnwise` writes it; None for one without a
        format.

    Raises:
        TypeError, ValueError: tensors that are no matrices, differ in shape, dtype or device, or
            cannot be cast; an unknown activation; no format, or a rowwise one of square blocks.
    """
    return _gated(gate, up, offs, activation, rowwise, columnwise)


def gated_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: ActivationName,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
    offs: Tensor | None = None,
    of_up: bool = True,
) -> tuple[Forms, Forms]:
    """The forms of the gradients of gate and of up, from one read of ``grad``, that of h.

    Bytes are those of autograd in eager mode: each product and the activation's gradient is rounded
    to the dtype of ``gate``, then cast. The columnwise form of h itself comes from :func:`gated`.

    Args:
        grad: ``[T, I]``, dtype and device of ``gate``.
        gate, up, activation, rowwise, columnwise, offs: as in :func:`gated`.
        of_up: False for the forms of the gradient of gate alone. Those of up are
            ``gated(gate, grad, ...)``; made later, they need less memory at once.

    Returns:
        The forms of the gradient of ``gate``, and of that of ``up``; (None, None) without them.

    Raises:
        TypeError, ValueError: as :func:`gated`.
    """
    return _gated_backward(grad, gate, up, offs, activation, rowwise, columnwise, of_up)


def joint_gated_backward(
    grad: Tensor,
    gate_up: Tensor,
    activation: ActivationName,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
    offs: Tensor | None = None,
) -> Forms:
    """The forms of the gradient of gate and up that lie side by side, from one read of both.

    Bytes are those of :func:`gated_backward`'s gradients, concatenated, then cast.

    Args:
        grad: ``[T, I]``, the gradient of ``h = activation(gate) * up``.
        gate_up: ``[T, 2I]``: gate, then up.
        activation, rowwise, columnwise, offs: as in :func:`gated`.

    Returns:
        The rowwise form, data ``[T, 2I]``, and the columnwise form, data ``[2I, T]``.

    Raises:
        TypeError, ValueError: as :func:`gated`; an odd number of columns.
    """
    return _joint_gated_backward(grad, gate_up, offs, activation, rowwise, columnwise)


def check_sources(
    sources: dict[str, Tensor | None],
    offs: Tensor | None,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> tuple[Tensor, ...]:
    """The sources that are there, of which ``gate`` is one.

    Raises:
        TypeError, ValueError: as :func:`gated`.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    check_formats(rowwise, columnwise)
    gate = sources["gate"]
    assert gate is not None
    given = {name: x for name, x in sources.items() if x is not None}
    for name, x in given.items():
        checks.high_precision(x, name)
        checks.rank(x, (2,), name, "flatten tokens to [T, I]")
        if x.shape != gate.shape:
            raise ValueError(
                f"{name} has shape {list(x.shape)} and gate {list(gate.shape)}: expected the same"
            )
        if x.dtype != gate.dtype:
            raise TypeError(
                f"{name} has dtype {x.dtype} and gate {gate.dtype}: convert one with .to()"
            )
        checks.same_device(x, gate, name, "gate")
    if offs is not None:
        checks.group_ends(offs, gate, "gate")
    return tuple(given.values())


def _check_joint(
    grad: Tensor,
    gate_up: Tensor,
    offs: Tensor | None,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> tuple[Tensor, ...]:
    checks.rank(gate_up, (2,), "gate_up", "flatten tokens to [T, 2I]")
    if gate_up.shape[1] % 2:
        raise ValueError(
            f"gate_up has {gate_up.shape[1]} columns: expected gate, then as many columns of up"
        )
    gate, up = gate_up.chunk(2, -1)
    given: dict[str, Tensor | None] = {"grad": grad, "gate": gate, "up": up}
    return check_sources(given, offs, activation, rowwise, columnwise)


def _decide_gated(
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> Callable[..., Forms]:
    sources = check_sources({"gate": gate, "up": up}, offs, activation, rowwise, columnwise)
    kernels = producer_kernels(sources, rowwise, columnwise)
    return recorded(kernels.gated, kernels.launches)


def _decide_gated_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
    of_up: bool,
) -> Callable[..., tuple[Forms, Forms]]:
    given: dict[str, Tensor | None] = {"grad": grad, "gate": gate, "up": up}
    sources = check_sources(given, offs, activation, rowwise, columnwise)
    kernels = producer_kernels(sources, rowwise, columnwise)
    return recorded(kernels.gated_backward, kernels.launches)


def _decide_joint_gated_backward(
    grad: Tensor,
    gate_up: Tensor,
    offs: Tensor | None,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> Callable[..., Forms]:
    sources = _check_joint(grad, gate_up, offs, activation, rowwise, columnwise)
    if grad.shape[1] % BLOCK:  # a block has columns of both
        return reference.joint_gated_backward
    kernels = producer_kernels(sources, rowwise, columnwise)
    return recorded(kernels.joint_gated_backward, kernels.launches)


def _dispatch_gated(
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> Forms:
    check_sources({"gate": gate, "up": up}, offs, activation, rowwise, columnwise)
    made = _gated_op(gate, up, offs, activation, name_of(rowwise), name_of(columnwise))
    return forms_of(made, rowwise, columnwise)


def _dispatch_gated_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
    of_up: bool,
) -> tuple[Forms, Forms]:
    given: dict[str, Tensor | None] = {"grad": grad, "gate": gate, "up": up}
    check_sources(given, offs, activation, rowwise, columnwise)
    names = name_of(rowwise), name_of(columnwise)
    made = _gated_backward_op(grad, gate, up, offs, activation, *names, of_up)
    if up is None or not of_up:
        return forms_of(made, rowwise, columnwise), (None, None)
    half = len(made) // 2
    return forms_of(made[:half], rowwise, columnwise), forms_of(made[half:], rowwise, columnwise)


def _dispatch_joint_gated_backward(
    grad: Tensor,
    gate_up: Tensor,
    offs: Tensor | None,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> Forms:
    _check_joint(grad, gate_up, offs, activation, rowwise, columnwise)
    names = name_of(rowwise), name_of(columnwise)
    made = _joint_gated_backward_op(grad, gate_up, offs, activation, *names)
    return forms_of(made, rowwise, columnwise)


_gated = Specialized(_decide_gated, _dispatch_gated)
_gated_backward = Specialized(_decide_gated_backward, _dispatch_gated_backward)
_joint_gated_backward = Specialized(_decide_joint_gated_backward, _dispatch_joint_gated_backward)


@torch.library.custom_op("blocktensor::gated", mutates_args=())
def _gated_op(
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: str | None,
    columnwise: str | None,
) -> list[Tensor]:
    return tensors_of(
        _gated.run(gate, up, offs, activation, format_named(rowwise), format_named(columnwise))
    )


@torch.library.custom_op("blocktensor::gated_backward", mutates_args=())
def _gated_backward_op(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: str | None,
    columnwise: str | None,
    of_up: bool = True,
) -> list[Tensor]:
    formats = format_named(rowwise), format_named(columnwise)
    return tensors_of(*_gated_backward.run(grad, gate, up, offs, activation, *formats, of_up))


@torch.library.custom_op("blocktensor::joint_gated_backward", mutates_args=())
def _joint_gated_backward_op(
    grad: Tensor,
    gate_up: Tensor,
    offs: Tensor | None,
    activation: str,
    rowwise: str | None,
    columnwise: str | None,
) -> list[Tensor]:
    formats = format_named(rowwise), format_named(columnwise)
    return tensors_of(_joint_gated_backward.run(grad, gate_up, offs, activation, *formats))


@_gated_op.register_fake
def _(
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: str | None,
    columnwise: str | None,
) -> list[Tensor]:
    return tensors_of(empty_forms(gate, offs, format_named(rowwise), format_named(columnwise)))


@_gated_backward_op.register_fake
def _(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: str | None,
    columnwise: str | None,
    of_up: bool = True,
) -> list[Tensor]:
    formats = format_named(rowwise), format_named(columnwise)
    of_each = [
        empty_forms(gate, offs, *formats) for _ in range(2 if up is not None and of_up else 1)
    ]
    return tensors_of(*of_each)


@_joint_gated_backward_op.register_fake
def _(
    grad: Tensor,
    gate_up: Tensor,
    offs: Tensor | None,
    activation: str,
    rowwise: str | None,
    columnwise: str | None,
) -> list[Tensor]:
    return tensors_of(empty_forms(gate_up, offs, format_named(rowwise), format_named(columnwise)))
