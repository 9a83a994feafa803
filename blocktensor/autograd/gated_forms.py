"""Save gate and up of a gated MLP, and cast h and the gradients of both in its backward.

A tensor leaves :class:`Sources` as it is read for the last time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.cast.ops import dequantize, quantize_rowwise
from ..ops.cast.producer import Forms
from ..ops.formats import Quantized
from ..ops.producers.ops import (
    gated,
    gated_backward,
    gated_backward_with_h,
    joint_gated_backward,
)
from ..ops.producers.reference import gradients
from . import plan as plans
from .gated_plan import Formats, GatedPlan
from .products import Dense

GATE, UP, H = range(3)
"""Numbers of the matrices. GATE stands for both where one linear makes gate and up."""


def save_gate_and_up(plan: GatedPlan, sources: list[Tensor | None]) -> Iterator[Tensor | None]:
    """Yield what backward reads of gate and up, ``[T, I]``: data and scales of each.

    No scales in high precision; None for what does not exist or will not be read. ``sources`` are
    gate and up; each is removed before the next is cast.
    """
    while sources:
        x = sources.pop(0)
        if x is None or not plan.needs_dh:
            yield from (None, None)
        elif not plan.store_fp8:
            yield from (x, None)
        else:
            cast = quantize_rowwise(x, plan.gate.format)
            del x
            yield from cast[:2]


def _read(plan: GatedPlan, data: Tensor | None, scale: Tensor | None) -> Tensor | None:
    """Return gate or up in high precision, as :func:`save_gate_and_up` saved it."""
    if not plan.store_fp8 or data is None:
        return data
    assert scale is not None
    return dequantize(Quantized(data, scale, plan.gate.format), plan.gate.out_dtype)


class Sources:
    """What backward has of h: its form, if forward saved it, gate and up, and its gradient.

    Attributes:
        has_gradient: whether gradients of gate and up can be computed.
    """

    def __init__(self, plan: GatedPlan, saved: list[Any], dh: Tensor | None) -> None:
        """Empty ``saved``: data and scales of h, then of :func:`save_gate_and_up`."""
        self.has_gradient = dh is not None
        self._plan, self._dh = plan, dh
        self._form, self._stored = tuple(saved[:2]), saved[2:]
        self._read: list[Any] = []
        saved.clear()

    def take_form(self) -> tuple[Tensor | None, Tensor | None]:
        """Return data and scale of the saved form, and drop them."""
        data, scale = self._form
        self._form = None, None
        return data, scale

    def gate_and_up(self) -> list[Any]:
        """Return gate and up in high precision."""
        while self._stored:
            self._read.append(_read(self._plan, *self._stored[:2]))
            del self._stored[:2]
        return self._read

    def take_all(self) -> tuple[Any, Any, Any]:
        """Return gate, up and the gradient of h, and drop them."""
        gate, up = self.gate_and_up()
        dh, self._dh = self._dh, None
        self._read = []
        return gate, up, dh


def forms_in_backward(
    product: Dense,
    plan: GatedPlan,
    sources: Sources,
    needs_h: bool,
    formats: Formats,
    needs_dbias: Sequence[bool],
    dbiases: list[Tensor | None],
) -> Iterator[tuple[int, Forms]]:
    """Yield the numbers and forms of what weight and input gradients read, in order.

    H, if needed, is the first. Sums of the gradients of gate and up, if needed, go to ``dbiases``.

    ``formats``: of the gradients of gate and up.
    """
    if plan.h_beside and needs_h and sources.has_gradient:
        yield from _all_at_once(plan, sources)
        return
    data, scale = sources.take_form()
    if needs_h:
        format = plan.down.x_columnwise
        assert format is not None
        made: list[Forms] = []
        if data is not None:
            assert scale is not None
            made.append((None, Quantized(data, scale, format)))
        else:
            both = halves(*sources.gate_and_up())
            made.append(gated(*both, plan.activation, None, format, product.offs))
            del both
        del data, scale
        yield H, made.pop()
    if sources.has_gradient:
        yield from _gradients_of_h(product, plan, sources, formats, needs_dbias, dbiases)


def _all_at_once(plan: GatedPlan, sources: Sources) -> Iterator[tuple[int, Forms]]:
    # One read for what forward would have to save h for: less memory where several layers wait for
    # their backwards, more in one layer alone (``recompute=True`` takes the least there).
    gate, up, dh = sources.take_all()
    format, h_format = plan.gate.format, plan.down.x_columnwise
    assert h_format is not None
    of_gate, of_up, h = gated_backward_with_h(
        dh, gate, up, plan.activation, format, format, h_format
    )
    made: list[Forms] = [of_gate, of_up, (None, h)]
    del gate, up, dh, of_gate, of_up, h
    for i in (H, UP, GATE):
        yield i, made.pop()


def _gradients_of_h(
    product: Dense,
    plan: GatedPlan,
    sources: Sources,
    formats: Formats,
    needs_dbias: Sequence[bool],
    dbiases: list[Tensor | None],
) -> Iterator[tuple[int, Forms]]:
    gate, up, dh = sources.take_all()
    activation, offs = plan.activation, product.offs
    made: list[Forms]
    if plan.up is None:
        made = [_joint_gradient(product, plan, dh, gate, formats, needs_dbias[0], dbiases)]
        del gate, dh
        yield GATE, made.pop()
        return
    if any(needs_dbias[:2]):  # the sums read the gradients in high precision
        both = gradients(dh, gate, up, activation)
        for i, (of, grad) in enumerate(zip((plan.gate, plan.up), both, strict=True)):
            if needs_dbias[i]:
                dbiases[i] = product.dbias(grad, of)
        made = [(None, None), (None, None)]
        if formats != (None, None):
            made = [product.forms(grad, *formats) for grad in both]
        del both, grad
    elif plan.recompute or _is_large(plan, gate, offs):
        # less memory at once, for another read of dh and gate
        made = [gated_backward(dh, gate, up, activation, *formats, offs, False)[0]]
        del up
        yield GATE, made.pop()
        made = [gated(gate, dh, activation, *formats, offs)]
        del gate, dh
        yield UP, made.pop()
        return
    else:
        made = [*gated_backward(dh, gate, up, activation, *formats, offs)]
    del gate, up, dh
    for i in (UP, GATE):
        yield i, made.pop()


def _is_large(plan: GatedPlan, gate: Tensor, offs: Tensor | None) -> bool:
    # A compiler cannot compare sizes; of rows in groups, no kernel makes both gradients in much
    # less time than one after the other.
    return offs is not None if plan.tracing else gate.nbytes >= plans.LARGE_BYTES


def _joint_gradient(
    product: Dense,
    plan: GatedPlan,
    dh: Tensor,
    gate_up: Tensor,
    formats: Formats,
    needs_dbias: bool,
    dbiases: list[Tensor | None],
) -> Forms:
    """Return the forms of the gradient of ``[T, 2I]``; put its sum, if needed, into ``dbiases``."""
    if not needs_dbias:
        return joint_gated_backward(dh, gate_up, plan.activation, *formats, product.offs)
    grad = torch.cat(gradients(dh, *halves(gate_up, None), plan.activation), -1)
    dbiases[0] = product.dbias(grad, plan.gate)
    return (None, None) if formats == (None, None) else product.forms(grad, *formats)


def halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return gate and up; without ``up``, the halves of ``gate``."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    return gate, up
