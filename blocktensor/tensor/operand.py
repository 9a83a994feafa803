"""The two forms of a matrix that products read, and how one is derived from the other."""

from __future__ import annotations

from typing import NamedTuple

from ..ops.cast.ops import transpose
from ..ops.formats import Quantized


class Operand(NamedTuple):
    """Up to two forms of one matrix (or stack).

    Square blocks transpose exactly, so either form is derived from the other on demand. Blocks of
    one row do not: their two forms are two casts of the high-precision tensor, made together or not
    at all.
    """

    rowwise: Quantized | None
    columnwise: Quantized | None

    def transposed(self) -> Operand:
        """The operand of the transposed matrix: the same bytes with the labels swapped."""
        return Operand(self.columnwise, self.rowwise)

    def need_rowwise(self) -> Quantized:
        """The rowwise form, derived by a byte transpose if it is not held.

        Raises:
            ValueError: it is not held, and blocks of one row would need a second rounding.
        """
        return self.rowwise or _derive(self.columnwise, "rowwise")

    def need_columnwise(self) -> Quantized:
        """The columnwise form, derived by a byte transpose if it is not held.

        Raises:
            ValueError: as :meth:`need_rowwise`.
        """
        return self.columnwise or _derive(self.rowwise, "columnwise")

    def nbytes(self) -> int:
        """Bytes of the forms held."""
        return sum(form.data.nbytes + form.scale.nbytes for form in self if form is not None)


def _derive(form: Quantized | None, wanted: str) -> Quantized:
    assert form is not None
    if not form.format.transposes:
        shape = list(form.data.shape)
        shape = shape if wanted == "columnwise" else shape[::-1]
        rows, cols = form.format.block_shape
        raise ValueError(
            f"this BlockwiseFP8Tensor {shape} was cast in {rows}x{cols} blocks without its "
            f"{wanted} form, which needs other scales: quantize the high-precision tensor with "
            f"{wanted}=True"
        )
    return transpose(form)
