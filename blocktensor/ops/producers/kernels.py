"""Producers by the cast kernels: on CUDA, bytes are those of ``reference.py``.

On the CPU, eager mode computes exp, erf and tanh in other ways.
"""

from __future__ import annotations

from torch import Tensor

from ..cast.groups import empty_grouped_columnwise
from ..cast.producer import Forms, Producer
from ..cast.triton_cast import plan_1x128
from ..formats import BlockFormat
from ..runtime.launch import Launch
from ..scale_layouts import empty_columnwise, empty_quantized
from .triton_activation import tile_of_elements


def _empty(
    x: Tensor, offs: Tensor | None, rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> Forms:
    row = None if rowwise is None else empty_quantized(x.shape, rowwise, x.device)
    if columnwise is None:
        return row, None
    if offs is None:
        return row, empty_columnwise(x, columnwise)
    return row, empty_grouped_columnwise(x, offs, None, columnwise)


def _plan(
    in_words: bool,
    detail: tuple[str, str],
    sources: tuple[Tensor, ...],
    offs: Tensor | None,
    forms: Forms,
    second: Forms | None = None,
) -> Launch:
    x, *more = sources
    row, col = forms
    if col is None:  # rowwise blocks ignore groups, and gain nothing from words
        return plan_1x128(x, row, None, producer=Producer(tile_of_elements, detail, more, second))
    if not in_words:
        producer = Producer(tile_of_elements, detail, more, second)
        return plan_1x128(x, row, col, offs, producer=producer)
    from ..cast.gluon_columnwise import plan_columnwise  # Triton may have no Gluon
    from .gluon_activation import tile_of_words

    producer = Producer(tile_of_words, detail, more, second)
    return plan_columnwise(x, row, col, offs, producer=producer)


def gated(
    in_words: bool,
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> Forms:
    """See :func:`blocktensor.ops.producers.reference.gated`."""
    made = _empty(gate, offs, rowwise, columnwise)
    role, sources = ("value", (gate,)) if up is None else ("gated", (gate, up))
    _plan(in_words, (activation, role), sources, offs, made)()
    return made


def gated_backward(
    in_words: bool,
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    offs: Tensor | None,
    activation: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> tuple[Forms, Forms]:
    """See :func:`blocktensor.ops.producers.reference.gated_backward`; one launch."""
    of_gate = _empty(gate, offs, rowwise, columnwise)
    if up is None:
        _plan(in_words, (activation, "gradient"), (gate, grad), offs, of_gate)()
        return of_gate, (None, None)
    of_up = _empty(gate, offs, rowwise, columnwise)
    detail = activation, "gated gradient"
    _plan(in_words, detail, (gate, grad, up), offs, of_gate, of_up)()
    return of_gate, of_up
