"""How compilers see an input that was gathered for several tensor parallel linears.

It carries what each rank keeps of its tokens (``distributed/tensor_parallel/prepare_input.py``).
A graph may begin or end with it: that is then inner tensors, as the FP8 forms are, and a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from torch import Tensor

PREPARED = ("prepared_data", "prepared_scale", "prepared_runs")
"""Names of the inner tensors."""

Holder = TypeVar("Holder", bound="HoldsPrepared")
Parts = tuple[Tensor | None, Tensor | None, Tensor | None]


class Prepared(Protocol):
    """What linears find on a prepared input."""

    @property
    def parts(self) -> Parts:
        """Data, scales, and a tensor without elements whose sizes say how tokens are cut."""

    @property
    def context(self) -> PreparedContext:
        """What the parts are parts of."""


class PreparedContext(Protocol):
    """A value that compilers compare and copy."""

    def of(self, data: Tensor | None, scale: Tensor | None, runs: Tensor | None) -> Prepared:
        """What has these parts."""


class HoldsPrepared:
    """Base class of a tensor with such a note.

    Attributes:
        prepared: the note, if any.
    """

    prepared: Prepared | None = None

    @property
    def prepared_context(self) -> PreparedContext | None:
        """What the inner tensors below are."""
        return None if self.prepared is None else self.prepared.context

    def with_prepared(
        self: Holder, context: PreparedContext | None, inner: Mapping[str, Tensor]
    ) -> Holder:
        """This tensor with the note that a compiler took apart; ``inner``: tensors by name."""
        if context is not None:
            self.prepared = context.of(*map(inner.get, PREPARED))
        return self

    @property
    def prepared_data(self) -> Tensor | None:
        """The data, as an attribute: compilers read inner tensors so."""
        return None if self.prepared is None else self.prepared.parts[0]

    @property
    def prepared_scale(self) -> Tensor | None:
        """The scales."""
        return None if self.prepared is None else self.prepared.parts[1]

    @property
    def prepared_runs(self) -> Tensor | None:
        """The tensor without elements."""
        return None if self.prepared is None else self.prepared.parts[2]
