"""The two forms of a matrix's FP8 bytes, and how one is derived from the other."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from .ops import library
from .ops.layouts import SQUARE_BLOCK, Form
from .ops.pinned import Ops
from .recipe import Recipe


class Forms:
    """Up to two forms of one matrix (or stack), each its data and scales.

    128x128 blocks transpose exactly, so either form is derived from the other on demand. 1x128
    blocks do not: their two forms are two casts of the high-precision tensor, made together or not
    at all.
    """

    rowwise_data: Tensor | None
    rowwise_scale: Tensor | None
    columnwise_data: Tensor | None
    columnwise_scale: Tensor | None
    block_shape: tuple[int, int]
    recipe: Recipe

    def forms(self) -> tuple[Form | None, Form | None]:
        """The rowwise and the columnwise (data, scale), None where not held."""
        row = None if self.rowwise_data is None else self.rowwise()
        col = None if self.columnwise_data is None else self.columnwise()
        return row, col

    def rowwise(self, ops: Ops = library) -> Form:
        """The rowwise (data, scale), derived by a byte transpose where 128x128 blocks lack it."""
        if self.rowwise_data is not None and self.rowwise_scale is not None:
            return self.rowwise_data, self.rowwise_scale
        if self.block_shape != SQUARE_BLOCK:
            self._refuse("rowwise")
        derived: Form = ops.transpose_square(self.columnwise_data, self.columnwise_scale)
        if self.recipe.columnwise == "keep":
            self.rowwise_data, self.rowwise_scale = derived
        return derived

    def columnwise(self, ops: Ops = library) -> Form:
        """The columnwise (data, scale), derived by a byte transpose where 128x128 blocks lack it.

        Raises:
            ValueError: 1x128 blocks cast without it: a second rounding would be needed.
        """
        if self.columnwise_data is not None and self.columnwise_scale is not None:
            return self.columnwise_data, self.columnwise_scale
        if self.block_shape != SQUARE_BLOCK:
            self._refuse("columnwise")
        derived: Form = ops.transpose_square(self.rowwise_data, self.rowwise_scale)
        if self.recipe.columnwise == "keep":
            self.columnwise_data, self.columnwise_scale = derived
        return derived

    def _refuse(self, wanted: str) -> NoReturn:
        shape = list(self.shape)  # type: ignore[attr-defined]  # such forms are a tensor's
        raise ValueError(
            f"this BlockwiseFP8Tensor {shape} was cast in 1x128 blocks without its "
            f"{wanted} form, which needs other scales: quantize the high-precision tensor with "
            f"{wanted}=True"
        )


class SquareForms(Forms):
    """A cast in 128x128 blocks that is no tensor: products need none, and it costs host time."""

    block_shape = SQUARE_BLOCK

    def __init__(self, rowwise: Form, recipe: Recipe) -> None:
        """Take a finished cast."""
        self.rowwise_data, self.rowwise_scale = rowwise
        self.columnwise_data = self.columnwise_scale = None
        self.recipe = recipe

    @staticmethod
    def quantize(x: Tensor, recipe: Recipe) -> SquareForms:
        """Cast ``x[..., N, K]``.

        Raises:
            TypeError, ValueError: another dtype or rank.
        """
        return SquareForms(library.quantize_square(x, recipe.power_of_two), recipe)
