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
from ..formats import BlockFormat, Quantized, group_columns, named
from ..runtime.specialize import Specialized, recorded
from ..scale_layouts import empty_columnwise, empty_quantized
from .choose_backend import producer_kernels
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
) -> tuple[Forms, Forms]:
    """The forms of the gradients of gate and of up, from one read of ``grad``, that of h.

    Bytes are those of autograd in eager mode: each product and the activation's gradient is rounded
    to the dtype of ``gate``, then cast. The columnwise form of h itself comes from :func:`gated`.

    Args:
        grad: ``[T, I]``, dtype and device of ``gate``.
        gate, up, activation, rowwise, columnwise, offs: as in :func:`gated`.

    Returns:
        The forms of the gradient of ``gate``, and of that of ``up``; (None, None) without ``up``.

    Raises:
        TypeError, ValueError: as :func:`gated`.
    """
    return _gated_backward(grad, gate, up, offs, activation, rowwise, columnwise)


def _check(
    sources: dict[str, Tensor | None],
    offs: Tensor | None,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> tuple[Tensor, ...]:
    # The sources that are there, of which `gate` is one
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    if rowwise is None and columnwise is None:
        raise ValueError("neither a rowwise nor a columnwise format was given: pass one or both")
    if rowwise is not None and rowwise.rows != 1:
        raise ValueError(
            f"the rowwise format is {rowwise.name}: expected blocks of one row, e.g. 1x128; square "
            f"blocks are for the columnwise form"
        )
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


def _decide_gated(
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> Callable[..., Forms]:
    sources = _check({"gate": gate, "up": up}, offs, activation, rowwise, columnwise)
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
) -> Callable[..., tuple[Forms, Forms]]:
    given: dict[str, Tensor | None] = {"grad": grad, "gate": gate, "up": up}
    sources = _check(given, offs, activation, rowwise, columnwise)
    kernels = producer_kernels(sources, rowwise, columnwise)
    return recorded(kernels.gated_backward, kernels.launches)


def _dispatch_gated(
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> Forms:
    _check({"gate": gate, "up": up}, offs, activation, rowwise, columnwise)
    made = _gated_op(gate, up, offs, activation, _name(rowwise), _name(columnwise))
    return _forms(made, rowwise, columnwise)


def _dispatch_gated_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> tuple[Forms, Forms]:
    given: dict[str, Tensor | None] = {"grad": grad, "gate": gate, "up": up}
    _check(given, offs, activation, rowwise, columnwise)
    names = _name(rowwise), _name(columnwise)
    made = _gated_backward_op(grad, gate, up, offs, activation, *names)
    if up is None:
        return _forms(made, rowwise, columnwise), (None, None)
    half = len(made) // 2
    return _forms(made[:half], rowwise, columnwise), _forms(made[half:], rowwise, columnwise)


_gated = Specialized(_decide_gated, _dispatch_gated)
_gated_backward = Specialized(_decide_gated_backward, _dispatch_gated_backward)


# Registered ops take names of formats, and return data and scale of each form in one list


def _name(format: BlockFormat | None) -> str | None:
    return None if format is None else format.name


def _named(name: str | None) -> BlockFormat | None:
    return None if name is None else named(name)


def _tensors(*all_forms: Forms) -> list[Tensor]:
    forms = [form for forms in all_forms for form in forms if form is not None]
    return [x for form in forms for x in form[:2]]


def _forms(
    made: list[Tensor], rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> Forms:
    row = None if rowwise is None else Quantized(made[0], made[1], rowwise)
    # the columnwise form is the last one
    return row, None if columnwise is None else Quantized(made[-2], made[-1], columnwise)


def _empty(
    gate: Tensor, offs: Tensor | None, rowwise: str | None, columnwise: str | None
) -> list[Tensor]:
    row = None if rowwise is None else empty_quantized(gate.shape, named(rowwise), gate.device)
    if columnwise is None:
        return _tensors((row, None))
    if offs is None:
        return _tensors((row, empty_columnwise(gate, named(columnwise))))
    tokens, k = gate.shape
    shape = k, group_columns(tokens, offs.shape[0])
    return _tensors((row, empty_quantized(shape, named(columnwise), gate.device)))


@torch.library.custom_op("blocktensor::gated", mutates_args=())
def _gated_op(
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: str | None,
    columnwise: str | None,
) -> list[Tensor]:
    return _tensors(_gated.run(gate, up, offs, activation, _named(rowwise), _named(columnwise)))


@torch.library.custom_op("blocktensor::gated_backward", mutates_args=())
def _gated_backward_op(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: str | None,
    columnwise: str | None,
) -> list[Tensor]:
    formats = _named(rowwise), _named(columnwise)
    return _tensors(*_gated_backward.run(grad, gate, up, offs, activation, *formats))


@_gated_op.register_fake
def _(
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: str | None,
    columnwise: str | None,
) -> list[Tensor]:
    return _empty(gate, offs, rowwise, columnwise)


@_gated_backward_op.register_fake
def _(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: str | None,
    columnwise: str | None,
) -> list[Tensor]:
    made = _empty(gate, offs, rowwise, columnwise)
    return made if up is None else made + _empty(gate, offs, rowwise, columnwise)
