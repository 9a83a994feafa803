"""The two forms of a matrix that products read: one derived from the other, or from a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..ops import checks
from ..ops.cast.ops import transpose
from ..ops.formats import BlockFormat, Quantized
from ..ops.scale_layouts import columnwise_width, laid_out
from ..recipe import Recipe


class Operand(NamedTuple):
    """Up to two forms of one matrix (or stack).

    Square blocks transpose exactly, so either form of a weight is derived from the other on demand.
    Blocks of one row do not: their two forms are two casts of the high-precision tensor, made
    together or not at all. So are those of an activation with square blocks columnwise only.
    """

    rowwise: Quantized | None
    columnwise: Quantized | None

    def transposed(self) -> Operand:
        """Return the operand of the transposed matrix: the same bytes with labels swapped."""
        return Operand(self.columnwise, self.rowwise)

    def need_rowwise(self, format: BlockFormat | None = None) -> Quantized:
        """Return the rowwise form, derived by a byte transpose if it is not held.

        Args:
            format: of the rowwise form, where it may differ from the columnwise one's.

        Raises:
            ValueError: it is not held, and its blocks differ, so that a second rounding would be
                needed.
        """
        return self.rowwise or _derive(self.columnwise, "rowwise", format)

    def need_columnwise(self, format: BlockFormat | None = None) -> Quantized:
        """Return the columnwise form, as :meth:`need_rowwise` does the rowwise one."""
        return self.columnwise or _derive(self.rowwise, "columnwise", format)

    def nbytes(self) -> int:
        """Return bytes of the forms held."""
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
    """Return the operand of inner tensors by name, as ``__tensor_flatten__`` names them."""
    return Operand(
        form_of(inner.get("rowwise_data"), inner.get("rowwise_scale"), rowwise_format),
        form_of(inner.get("columnwise_data"), inner.get("columnwise_scale"), columnwise_format),
    )


def form_of(data: Tensor | None, scale: Tensor | None, format: BlockFormat) -> Quantized | None:
    """Return a form, or None where it is not held."""
    return None if data is None or scale is None else Quantized(data, scale, format)


# Checks of a tensor that a file has put together

_SIDES = ("rowwise", "columnwise")


def checked(x: Tensor, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``parts``, the attributes of a BlockwiseFP8Tensor in a file, if they fit ``x``.

    Values are not looked at: a block with NaN or Inf has a scale of NaN or Inf, and a load does not
    wait for a GPU. Scales that are laid out otherwise are copied.

    Raises:
        ValueError: they do not fit ``x`` or each other.
    """
    what = f"a BlockwiseFP8Tensor {list(x.shape)} from a file"
    recipe, source = parts.get("recipe"), parts.get("source")
    formats: list[BlockFormat] = []
    for side in _SIDES:
        format = parts.get(f"{side}_format")
        if not isinstance(format, BlockFormat) or not isinstance(recipe, Recipe):
            raise ValueError(
                f"{what} has format {format!r} and recipe {recipe!r}: expected a BlockFormat and a "
                f"Recipe; the file is damaged or was not written by blocktensor"
            )
        if format.scale_rounding != recipe.scale:
            raise ValueError(f"{what} has blocks {format.name} and scale={recipe.scale!r}")
        formats.append(format)
    is_weight = all(format.transposes for format in formats)
    scales = {}
    for side, format in zip(_SIDES, formats, strict=True):
        data, scale = parts.get(f"{side}_data"), parts.get(f"{side}_scale")
        if data is None and scale is None:
            continue
        if not isinstance(data, Tensor) or not isinstance(scale, Tensor):
            raise ValueError(f"{what} has {side} data and scales that are not both tensors")
        form = Quantized(data, scale, format)
        try:
            checks.gemm_output(x.dtype)
            checks.quantized(form)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{what}: its {side} form does not fit: {error}") from None
        *lead, cols = x.shape if is_weight else (math.prod(x.shape[:-1]), x.shape[-1])
        expected = [*lead, cols] if side == "rowwise" else [*lead[:-1], cols, lead[-1]]
        # with the zeros of a columnwise cast
        wider = [*expected[:-1], columnwise_width(expected[-1], format)]
        fits = list(data.shape) in ([expected] if is_weight else [expected, wider])
        if not fits or not _matrices_are_contiguous(data):
            raise ValueError(
                f"{what} has {side} data {list(data.shape)} with strides {list(data.stride())}: "
                f"expected {expected}, contiguous matrices"
            )
        if data.device.type != x.device.type:
            raise ValueError(f"{what} is on {x.device}, its {side} data on {data.device}")
        scales[f"{side}_scale"] = laid_out(*form).scale
    if source is not None and not (
        isinstance(source, Tensor)
        and (source.shape, source.dtype, source.device) == (x.shape, x.dtype, x.device)
    ):
        raise ValueError(f"{what} has a source that is no {x.dtype} {list(x.shape)} on {x.device}")
    if not scales:
        raise ValueError(f"{what} has neither a rowwise nor a columnwise form")
    return {**parts, **scales}


def _matrices_are_contiguous(data: Tensor) -> bool:
    """Allow space between the matrices of a stack, whose rows a rank may have cut out."""
    if data.ndim == 2 or data.numel() == 0:
        return data.is_contiguous()
    disjoint = data.shape[0] == 1 or data.stride(0) >= data[0].numel()
    return disjoint and data[0].is_contiguous()
