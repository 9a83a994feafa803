"""The two forms of a matrix that products read, and how one is derived from the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from ..ops.cast.ops import transpose
from ..ops.formats import BlockFormat, Quantized


class Operand(NamedTuple):
    """Up to two forms of one matrix (or stack).

    Square blocks transpose exactly, so either form of a weight is derived from the other on demand.
    Blocks of one row do not: their two forms are two casts of the high-precision tensor, made
    together or not at all. So are those of an activation with square blocks columnwise only.
    """

    rowwise: Quantized | None
    columnwise: Quantized | None

    def transposed(self) -> Operand:
        """The operand of the transposed matrix: the same bytes with the labels swapped."""
        return Operand(self.columnwise, self.rowwise)

    def need_rowwise(self, format: BlockFormat | None = None) -> Quantized:
        """The rowwise form, derived by a byte transpose if it is not held.

        ``format``: what it is cast in, if it may not be that of the columnwise form.

        Raises:
            ValueError: it is not held, and its blocks are others, which would need a second
                rounding.
        """
        return self.rowwise or _derive(self.columnwise, "rowwise", format)

    def need_columnwise(self, format: BlockFormat | None = None) -> Quantized:
        """The columnwise form, derived by a byte transpose if it is not held.

        ``format``: what it is cast in, if it may not be that of the rowwise form.

        Raises:
            ValueError: as :meth:`need_rowwise`.
        """
        return self.columnwise or _derive(self.rowwise, "columnwise", format)

    def nbytes(self) -> int:
        """Bytes of the forms held."""
        return sum(form.data.nbytes + form.scale.nbytes for form in self if form is not None)


def _derive(form: Quantized | None, wanted: str, format: BlockFormat | None) -> Quantized:
    assert form is not None
    is_other = format is not None and format.name != form.format.name
    if is_other or not form.format.transposes:
        shape = list(form.data.shape)
        shape = shape if wanted == "columnwise" else shape[::-1]
        rows, cols = form.format.block_shape
        raise ValueError(
            f"this BlockwiseFP8Tensor {shape} was cast in {rows}x{cols} blocks without its "
            f"{wanted} form, which needs other scales: quantize the high-precision tensor with "
            f"{wanted}=True"
        )
    return transpose(form)


def operand_of(
    inner: Mapping[str, Tensor], rowwise_format: BlockFormat, columnwise_format: BlockFormat
) -> Operand:
    """The operand of inner tensors by name, as ``__tensor_flatten__`` names them."""
    return Operand(
        form_of(inner.get("rowwise_data"), inner.get("rowwise_scale"), rowwise_format),
        form_of(inner.get("columnwise_data"), inner.get("columnwise_scale"), columnwise_format),
    )


def form_of(data: Tensor | None, scale: Tensor | None, format: BlockFormat) -> Quantized | None:
    """A form that may not be held."""
    return None if data is None or scale is None else Quantized(data, scale, format)
