"""The report of a load: every tensor of the checkpoint and of the model, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from ..text_table import collapse, text_table


@dataclass(frozen=True)
class LoadReport:
    """The tensors of a checkpoint and of the model, by name; ``print(report)`` shows a table.

    Attributes:
        fp8: weights that are now FP8, frozen.
        plain: parameters and buffers that are not FP8.
        missing: in the model but not in the checkpoint; unchanged.
        unexpected: in the checkpoint but not in the model; not read.
    """

    fp8: tuple[str, ...]
    plain: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def __str__(self) -> str:
        outcomes = (
            (self.fp8, "loaded", "FP8, frozen"),
            (self.plain, "loaded", "the model's dtype"),
            (self.missing, "unchanged", "not in the checkpoint"),
            (self.unexpected, "not read", "not in the model"),
        )
        rows = collapse((name, *what) for names, *what in outcomes for name in names)
        summary = (
            f"{len(self.fp8)} loaded in FP8, {len(self.plain)} in the model's dtype; "
            f"{len(self.missing)} missing, {len(self.unexpected)} unexpected"
        )
        return text_table(("tensor", "outcome", "as"), rows) + "\n" + summary
