"""The gradients of gate and of up, and h itself, from one read: the function and its op."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..cast.producer import Forms
from ..formats import BlockFormat, Quantized, named
from ..runtime.specialize import Specialized, recorded
from .choose_backend import producer_kernels
from .op_forms import empty_forms, forms_of, tensors_of
from .ops import ActivationName, check_sources
from .reference import ACTIVATIONS


class Results(NamedTuple):
    """The forms of the gradient of gate and of that of up, and the columnwise form of h."""

    of_gate: Forms
    of_up: Forms
    h: Quantized


def is_from_one_read(activation: ActivationName, dtype: torch.dtype, columns: int) -> bool:
    """Whether the Gluon kernel makes all three from one read: of whole vectors of bf16.

    Where there is no such kernel, h takes a read of gate and up.
    """
    return ACTIVATIONS[activation].is_light and dtype == torch.bfloat16 and columns % 8 == 0


def gated_backward_with_h(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: ActivationName,
    rowwise: BlockFormat,
    columnwise: BlockFormat,
    h_columnwise: BlockFormat,
) -> Results:
    """``gated_backward(...)``, and ``gated(gate, up, activation, None, h_columnwise)``.

    Where :func:`is_from_one_read`, h costs no read: it need not be saved for a weight gradient.

    Args:
        grad, gate, up: ``[T, I]`` bf16, fp16 or fp32, alike; ``grad`` is that of h.
        activation: as in :func:`~.ops.gated`.
        rowwise, columnwise: formats of both gradients, the rowwise one in blocks of one row.
        h_columnwise: format of h; with scales rounded as theirs, or it takes a read of its own.

    Raises:
        TypeError, ValueError: as :func:`~.ops.gated`.
    """
    return _with_h(grad, gate, up, activation, rowwise, columnwise, h_columnwise)


def _decide(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    rowwise: BlockFormat,
    columnwise: BlockFormat,
    h_columnwise: BlockFormat,
) -> Callable[..., Results]:
    given: dict[str, Tensor | None] = {"grad": grad, "gate": gate, "up": up}
    sources = check_sources(given, None, activation, rowwise, columnwise)
    kernels = producer_kernels(sources, rowwise, columnwise)
    return recorded(kernels.gated_backward_with_h, kernels.launches)


def _dispatch(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    rowwise: BlockFormat,
    columnwise: BlockFormat,
    h_columnwise: BlockFormat,
) -> Results:
    given: dict[str, Tensor | None] = {"grad": grad, "gate": gate, "up": up}
    check_sources(given, None, activation, rowwise, columnwise)
    names = (format.name for format in (rowwise, columnwise, h_columnwise))
    made = _with_h_op(grad, gate, up, activation, *names)
    of_gate, of_up = (forms_of(made[i : i + 4], rowwise, columnwise) for i in (0, 4))
    return Results(of_gate, of_up, Quantized(made[8], made[9], h_columnwise))


_with_h = Specialized(_decide, _dispatch)


@torch.library.custom_op("blocktensor::gated_backward_with_h", mutates_args=())
def _with_h_op(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    rowwise: str,
    columnwise: str,
    h_columnwise: str,
) -> list[Tensor]:
    formats = named(rowwise), named(columnwise), named(h_columnwise)
    of_gate, of_up, h = _with_h.run(grad, gate, up, activation, *formats)
    return tensors_of(of_gate, of_up, (None, h))


@_with_h_op.register_fake
def _(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    rowwise: str,
    columnwise: str,
    h_columnwise: str,
) -> list[Tensor]:
    of_each = [empty_forms(gate, None, named(rowwise), named(columnwise)) for _ in range(2)]
    return tensors_of(*of_each, empty_forms(gate, None, None, named(h_columnwise)))
