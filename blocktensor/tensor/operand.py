"""Define ``Operand``: the two forms of a matrix that matmuls read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from ..ops.cast.ops import columnwise_from_rowwise, transpose
from ..ops.formats import BlockFormat, Quantized


class Operand(NamedTuple):
    """Up to two forms of one matrix (or stack).

    Square blocks transpose exactly, so either form of a weight is derived from the other on demand.
    Blocks of one row do not. With power-of-two scales the columnwise form is derived from the
    rowwise one (``reference.columnwise_from_rowwise``); with others the two forms are two casts of
    the high-precision tensor, made together or not at all.
    """

    rowwise: Quantized | None
    columnwise: Quantized | None

    def transposed(self) -> Operand:
        """Return the operand of the transposed matrix: the same bytes with labels swapped."""
        return Operand(self.columnwise, self.rowwise)

    def need_rowwise(self, format: BlockFormat | None = None) -> Quantized:
        """Return the rowwise form, derived by a byte transpose if it is not held.

        Args:
            format: the format of the rowwise form, if it may differ from the columnwise one.

        Raises:
            ValueError: it is not held and would need a second rounding.
        """
        return self.rowwise or _derive(self.columnwise, "rowwise", format)

    def need_columnwise(self, format: BlockFormat | None = None) -> Quantized:
        """Return the columnwise form, derived if it is not held.

        Args:
            format: the format of the columnwise form, if it may differ from the rowwise one.

        Raises:
            ValueError: it is not held and would need a second rounding.
        """
        if self.columnwise is None and (row := self.rowwise) is not None:
            wanted = format or row.format
            if row.format.rows == 1 and row.format.power_of_two and wanted.power_of_two:
                return columnwise_from_rowwise(row, wanted)
        return self.columnwise or _derive(self.rowwise, "columnwise", format)

    def nbytes(self) -> int:
        """Return the bytes of the forms held."""
        return sum(form.data.nbytes + form.scale.nbytes for form in self if form is not None)


def _derive(form: Quantized | None, wanted: str, format: BlockFormat | None) -> Quantized:
    assert form is not None
    is_other = format is not None and format.name != form.format.name
    if is_other or not form.format.transposes:
        held = "rowwise" if wanted == "columnwise" else "columnwise"
        rows, cols = form.format.block_shape
        raise ValueError(
            f"this BlockwiseFP8Tensor was cast in {rows}x{cols} blocks to a {held} form "
            f"{list(form.data.shape)}, without its {wanted} form, which needs other scales: "
            f"quantize the high-precision tensor with {wanted}=True"
        )
    return transpose(form)


def operand_of(
    inner: Mapping[str, Tensor], rowwise_format: BlockFormat, columnwise_format: BlockFormat
) -> Operand:
    """Return the operand of inner tensors, by their names in ``__tensor_flatten__``."""
    return Operand(
        form_of(inner.get("rowwise_data"), inner.get("rowwise_scale"), rowwise_format),
        form_of(inner.get("columnwise_data"), inner.get("columnwise_scale"), columnwise_format),
    )


def form_of(data: Tensor | None, scale: Tensor | None, format: BlockFormat) -> Quantized | None:
    """Return a form, or None without data."""
    return None if data is None or scale is None else Quantized(data, scale, format)
