"""Forms of producers: empty ones, and those of schemas, which take names and return one list."""

from __future__ import annotations

from torch import Tensor

from ..cast.producer import Forms
from ..formats import BlockFormat, Quantized, group_columns, named
from ..scale_layouts import empty_columnwise, empty_quantized


def check_formats(rowwise: BlockFormat | None, columnwise: BlockFormat | None) -> None:
    """Raise where no form is asked for, or a rowwise one of square blocks.

    Raises:
        ValueError: that.
    """
    if rowwise is None and columnwise is None:
        raise ValueError("neither a rowwise nor a columnwise format was given: pass one or both")
    if rowwise is not None and rowwise.rows != 1:
        raise ValueError(
            f"the rowwise format is {rowwise.name}: expected blocks of one row, e.g. 1x128; square "
            f"blocks are for the columnwise form"
        )


def name_of(format: BlockFormat | None) -> str | None:
    """The name that a schema takes; None for no form."""
    return None if format is None else format.name


def format_named(name: str | None) -> BlockFormat | None:
    """The format of that name."""
    return None if name is None else named(name)


def tensors_of(*all_forms: Forms) -> list[Tensor]:
    """Data and scale of every form there is, in order."""
    forms = [form for forms in all_forms for form in forms if form is not None]
    return [x for form in forms for x in form[:2]]


def forms_of(
    made: list[Tensor], rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> Forms:
    """The forms of :func:`tensors_of`."""
    row = None if rowwise is None else Quantized(made[0], made[1], rowwise)
    # the columnwise form is the last one
    return row, None if columnwise is None else Quantized(made[-2], made[-1], columnwise)


def halves(forms: Forms) -> tuple[Forms, Forms]:
    """The forms of the first half of the columns of ``[T, 2I]``, and of the rest: views.

    I must be a multiple of the length of a block.
    """
    row, col = forms
    rows = (None, None) if row is None else _halves(row, 1)
    columns = (None, None) if col is None else _halves(col, 0)
    return (rows[0], columns[0]), (rows[1], columns[1])


def _halves(x: Quantized, dim: int) -> tuple[Quantized, Quantized]:
    (left, right), (of_left, of_right) = (part.chunk(2, dim) for part in x[:2])
    return Quantized(left, of_left, x.format), Quantized(right, of_right, x.format)


def empty_forms(
    x: Tensor, offs: Tensor | None, rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> Forms:
    """Forms that are not yet written; ``x``: ``[T, K]``, in groups that end at ``offs``."""
    row = None if rowwise is None else empty_quantized(x.shape, rowwise, x.device)
    if columnwise is None:
        return row, None
    if offs is None:
        return row, empty_columnwise(x, columnwise)
    tokens, k = x.shape
    shape = k, group_columns(tokens, offs.shape[0])
    return row, empty_quantized(shape, columnwise, x.device)
