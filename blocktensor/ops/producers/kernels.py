"""Run producers in the cast kernels, with the bytes of ``reference.py`` on CUDA.

On the CPU, eager mode computes other bits of exp and tanh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..cast.producer import Forms, Producer, empty_forms, halves
from ..cast.triton_cast import is_awkward, plan_1x128
from ..formats import BlockFormat
from .activations import ActivationName
from .ptx import word_ptx
from .triton_activation import tile_of_elements


def _launch(
    in_words: bool,
    detail: Any,
    sources: tuple[Tensor, ...],
    offs: Tensor | None,
    forms: Forms,
    second: Forms | None = None,
    widths: int = 1,
) -> None:
    """Compute the PTX of ``detail`` from the sources, and cast the result."""
    x, *more = sources
    row, col = forms
    if in_words and col is not None:  # rowwise forms alone are no faster on words
        from ..cast import gluon_columnwise  # this Triton may have no Gluon
        from .gluon_activation import tile_of_words

        producer = Producer(tile_of_words, detail, more, second, widths)
        gluon_columnwise.plan_columnwise(x, row, col, offs, producer=producer)()
        return
    mixed = row is not None and col is not None and row.format is not col.format
    if mixed and any(map(is_awkward, sources)):
        # both forms of a tile would spill registers, as in triton_cast._splits
        for part in range(2):
            chosen = None if second is None else _only(second, part)
            only = _only(forms, part)
            _launch(in_words, detail, sources, offs, only, chosen, widths)
        return
    producer = Producer(tile_of_elements, detail, more, second, widths)
    plan_1x128(x, row, col, offs, producer=producer)()


def _of_gradients(activation: ActivationName, gate: Tensor) -> tuple[str, str]:
    """Return the PTX of the gradients of gate and of up."""
    of_gate = word_ptx(activation, "gated gradient", gate.dtype)
    return of_gate, word_ptx(activation, "gated with gradient", gate.dtype)


def _only(forms: Forms, part: int) -> Forms:
    return (forms[0], None) if part == 0 else (None, forms[1])


@dataclass(frozen=True)
class Kernels:
    """The producers of one kind of cast kernels.

    Attributes:
        in_words: True to use the Gluon cast kernels if columnwise forms are written.
    """

    in_words: bool

    def gated(
        self,
        gate: Tensor,
        up: Tensor,
        activation: ActivationName,
        rowwise: BlockFormat | None,
        columnwise: BlockFormat | None,
        offs: Tensor | None = None,
    ) -> Forms:
        """See :func:`blocktensor.ops.producers.reference.gated`."""
        forms = empty_forms(gate, offs, rowwise, columnwise)
        detail = word_ptx(activation, "gated", gate.dtype), None
        _launch(self.in_words, detail, (gate, up), offs, forms)
        return forms

    def gated_backward(
        self,
        grad: Tensor,
        gate: Tensor,
        up: Tensor,
        activation: ActivationName,
        rowwise: BlockFormat | None,
        columnwise: BlockFormat | None,
        offs: Tensor | None = None,
        of_up: bool = True,
    ) -> tuple[Forms, Forms]:
        """See :func:`blocktensor.ops.producers.reference.gated_backward`."""
        of_gate = empty_forms(gate, offs, rowwise, columnwise)
        second = empty_forms(gate, offs, rowwise, columnwise) if of_up else None
        detail = _of_gradients(activation, gate)
        _launch(self.in_words, detail, (gate, grad, up), offs, of_gate, second)
        return of_gate, second or (None, None)

    def joint_gated_backward(
        self,
        grad: Tensor,
        gate_up: Tensor,
        activation: ActivationName,
        rowwise: BlockFormat | None,
        columnwise: BlockFormat | None,
        offs: Tensor | None = None,
    ) -> Forms:
        """See :func:`~blocktensor.ops.producers.reference.joint_gated_backward`; whole blocks."""
        forms = empty_forms(gate_up, offs, rowwise, columnwise)
        gate, up = gate_up.chunk(2, -1)
        detail = _of_gradients(activation, gate)
        _launch(self.in_words, detail, (gate, grad, up), offs, *halves(forms), widths=2)
        return forms


elements, words = Kernels(in_words=False), Kernels(in_words=True)
