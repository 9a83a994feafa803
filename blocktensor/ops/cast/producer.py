"""Define producers: cast kernels cast what a producer computes, instead of a tensor in memory.

A cast kernel reads a tile, then casts it. With a producer, a device function first computes the
tile from the tiles at the same place in several tensors. So the producers of ``ops/producers/``
need no cast kernels of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..formats import BlockFormat, Quantized, group_rows
from ..scale_layouts import empty_columnwise, empty_quantized

Forms = tuple[Quantized | None, Quantized | None]
"""The rowwise and the columnwise form of a matrix, either of which may be absent."""


@dataclass(frozen=True)
class Producer:
    """The computation of a tile before its cast.

    Attributes:
        compute: the device function ``(x, y, z, part, DETAIL, DTYPE)`` from tiles of up to three
            tensors to a tile of the same shape: elements in Triton, words in Gluon. Zeros must give
            +0, since columnwise casts end in zeros.
        detail: a constant for ``compute``.
        more: y and z, ``[M, K]`` like x, with rows of unit stride. In Triton, a second part gets
            zeros for z.
        second: the forms of a second tile from the same tensors, part 1. In Gluon one program makes
            both; in Triton the next program does, and finds the sources in cache.
        widths: row stride of the rowwise form, in widths of x: 2 if the forms of both parts are
            halves of one form.
    """

    compute: Any
    detail: Any
    more: Sequence[Tensor] = ()
    second: Forms | None = None
    widths: int = 1

    def constants(self) -> dict[str, Any]:
        """Return the kernel's compile-time arguments."""
        return {
            "COMPUTE": self.compute,
            "DETAIL": self.detail,
            "SOURCES": 1 + len(self.more),
            "PARTS": self.parts,
            "WIDTHS": self.widths,
        }

    @property
    def parts(self) -> int:
        """The number of tiles that are computed at each place."""
        return 2 if self.second else 1

    def sized(self, row: Quantized | None) -> tuple[Tensor, ...]:
        """Return the outputs that have as many rows as the sources, given the rowwise form."""
        forms = (row, *(self.second or ())[:1])
        return tuple(x for form in forms if form is not None for x in form[:2])

    def arguments(self, x: Tensor, outputs: Sequence[Tensor], unit: int = 1) -> tuple[Any, ...]:
        """Return the further arguments: y, z, their row strides, and the outputs of part 1.

        Args:
            x: the tensor that the kernel reads itself.
            outputs: data and scales of part 0, which are placeholders for absent arguments.
            unit: the unit of row strides, in elements.
        """
        y, z = (*self.more, x, x)[:2]
        forms = self.second or (None, None)
        second = [
            made
            for form, first in zip(forms, (outputs[:2], outputs[2:]), strict=True)
            for made in (form[:2] if form else first)
        ]
        return y, z, y.stride(0) // unit, z.stride(0) // unit, *second


NONE = Producer(None, None)
"""No producer: the kernel casts what it reads."""


def empty_forms(
    x: Tensor, offs: Tensor | None, rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> Forms:
    """Return uninitialised forms of ``x[T, K]``, whose rows may be in groups that end at ``offs``.

    In groups, the rowwise form has :func:`~blocktensor.ops.formats.group_rows` rows.
    """
    rows, k = x.shape
    rows = rows if offs is None else group_rows(rows)
    return (
        None if rowwise is None else empty_quantized((rows, k), rowwise, x.device),
        None if columnwise is None else empty_columnwise(x, columnwise, offs),
    )


def halves(forms: Forms) -> tuple[Forms, Forms]:
    """Return views of the forms of the first and of the second half of the columns of ``[T, 2I]``.

    I must be a multiple of the length of a block.
    """
    row, col = forms
    rows = (None, None) if row is None else _halves(row, 1)
    columns = (None, None) if col is None else _halves(col, 0)
    return (rows[0], columns[0]), (rows[1], columns[1])


def _halves(x: Quantized, dim: int) -> tuple[Quantized, Quantized]:
    (left, right), (of_left, of_right) = (part.chunk(2, dim) for part in x[:2])
    return Quantized(left, of_left, x.format), Quantized(right, of_right, x.format)
