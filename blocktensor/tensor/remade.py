"""A columnwise form that backward makes, for all linears that read one input."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident

from ..ops.formats import Quantized


class Remade:
    """The columnwise form of one input: made by its first backward, freed by its last."""

    __slots__ = ("_held", "_readers")

    def __init__(self) -> None:
        self._readers = 0
        # by thread: two may run backward through one graph at once
        self._held: dict[int, tuple[Quantized, int]] = {}

    def add_reader(self) -> None:
        """Count a linear whose backward will read the form."""
        self._readers += 1

    def read(self, make: Callable[[], Quantized]) -> Quantized:
        """The form, by ``make`` if no backward before this one holds it for this one."""
        held = self._held.pop(get_ident(), None)
        form, left = held or (make(), self._readers)
        if left > 1:
            self._held[get_ident()] = form, left - 1
        return form
