"""Producers by the cast kernels: on CUDA, bytes are those of ``reference.py``.

On the CPU, eager mode computes exp, erf and tanh in other ways.
"""

from __future__ import annotations

from torch import Tensor

from ..cast.groups import empty_grouped_columnwise
from ..cast.producer import Forms, Producer
from ..cast.triton_cast import is_awkward, plan_1x128
from ..formats import BlockFormat
from ..scale_layouts import empty_columnwise, empty_quantized
from .triton_activation import tile_of_elements
from .triton_norm import normalized_elements


def _empty(
    x: Tensor, offs: Tensor | None, rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> Forms:
    row = None if rowwise is None else empty_quantized(x.shape, rowwise, x.device)
    if columnwise is None:
        return row, None
    if offs is None:
        return row, empty_columnwise(x, columnwise)
    return row, empty_grouped_columnwise(x, offs, None, columnwise)


def _launch(
    in_words: bool,
    detail: tuple[str, str],
    sources: tuple[Tensor, ...],
    offs: Tensor | None,
    forms: Forms,
    second: Forms | None = None,
) -> None:
    x, *more = sources
    row, col = forms
    if in_words and col is not None:  # rowwise forms gain nothing from words
        from ..cast.gluon_columnwise import plan_columnwise  # Triton may have no Gluon
        from .gluon_activation import tile_of_words

        producer = Producer(tile_of_words, detail, more, second)
        plan_columnwise(x, row, col, offs, producer=producer)()
        return
    mixed = row is not None and col is not None and row.format is not col.format
    if mixed and any(map(is_awkward, sources)):
        # both forms of a tile would spill, as in triton_cast.quantize_both
        for part in range(2):
            chosen = None if second is None else _only(second, part)
            _launch(in_words, detail, sources, offs, _only(forms, part), chosen)
        return
    producer = Producer(tile_of_elements, detail, more, second)
    plan_1x128(x, row, col, None if col is None else offs, producer=producer)()


def normalized(
    in_words: bool,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    kind: str,
    rowwise: BlockFormat | None,
    columnwise: BlockFormat | None,
) -> Forms:
    """See :func:`blocktensor.ops.producers.norm_reference.normalized`."""
    row, col = made = _empty(x, None, rowwise, columnwise)
    more = [weight.expand(x.shape)]
    if in_words and col is not None:
        from ..cast.gluon_columnwise import plan_columnwise
        from .gluon_norm import normalized_words

        producer = Producer(normalized_words, kind, more, per_row=rstd)
        plan_columnwise(x, row, col, producer=producer)()
        return made
    producer = Producer(normalized_elements, kind, more, per_row=rstd)
    if row is not None and col is not None and row.format is not col.format and is_awkward(x):
        plan_1x128(x, row, None, producer=producer)()  # both would spill, as above
        plan_1x128(x, None, col, producer=producer)()
        return made
    plan_1x128(x, row, col, producer=producer)()
    return made


def _only(forms: Forms, part: int) -> Forms:
    return (forms[0], None) if part == 0 else (None, forms[1])


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
    _launch(in_words, (activation, role), sources, offs, made)
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
    """See :func:`blocktensor.ops.producers.reference.gated_backward`."""
    of_gate = _empty(gate, offs, rowwise, columnwise)
    if up is None:
        _launch(in_words, (activation, "gradient"), (gate, grad), offs, of_gate)
        return of_gate, (None, None)
    of_up = _empty(gate, offs, rowwise, columnwise)
    detail = activation, "gated gradient"
    _launch(in_words, detail, (gate, grad, up), offs, of_gate, of_up)
    return of_gate, of_up
