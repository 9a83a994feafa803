"""Between forward and backward: a norm's operands in place of a columnwise form of its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..ops.formats import BlockFormat, Quantized
from ..tensor.norm_call import AnyNormKind, NormCall
from ..tensor.normed_tensor import NormedTensor
from ..tensor.remade import Remade

Saved = Sequence[Tensor | None]


class Remaking(NamedTuple):
    """How backward makes the columnwise form of an input from the operands of a norm.

    Attributes:
        kind, eps: of the :class:`~blocktensor.tensor.norm_call.NormCall`.
        format: of the form.
        remade: what all linears share that read the input.
    """

    kind: AnyNormKind
    eps: float | None
    format: BlockFormat
    remade: Remade

    def columnwise(self, saved: Saved, tracing: bool) -> Quantized:
        """The form; a compiler is shown that of each linear, and removes what is there twice."""
        x, weight, rstd = saved
        assert x is not None
        assert weight is not None
        call = NormCall(x, weight, rstd, self.kind, self.eps)
        if tracing:
            return call.columnwise(self.format)
        return self.remade.read(lambda: call.columnwise(self.format))


def remaking(x: NormedTensor, format: BlockFormat | None) -> tuple[Remaking | None, Saved]:
    """How backward makes the columnwise form of ``x``, and what it needs for that.

    None if forward's form is to be saved, or none will be read (``format`` is None).

    Raises:
        RuntimeError: the input of the norm, or its weight, was changed in place since.
    """
    if format is None or x.remade is None:
        return None, ()
    norm = x.unchanged_norm()
    x.remade.add_reader()
    return Remaking(norm.kind, norm.eps, format, x.remade), (norm.x, norm.weight, norm.rstd)
