"""What :func:`blocktensor.fuse` fused, and why it left the rest alone."""

from __future__ import annotations

from dataclasses import dataclass

from ..text_table import collapse, text_table


@dataclass(frozen=True)
class FusionEntry:
    """One module that looks like a gated MLP, like experts, or like a norm that linears read.

    Attributes:
        name: of the module; empty for the model itself.
        kind: its class.
        computes: what it was taken for.
        reason: why it was left alone; empty if it was fused.
    """

    name: str
    kind: str
    computes: str
    reason: str = ""


@dataclass(frozen=True)
class FusionReport:
    """The result of :func:`blocktensor.fuse`; ``print(report)`` shows it as a table.

    Attributes:
        entries: all modules that look like gated MLPs, then experts, then norms that linears read.
    """

    entries: tuple[FusionEntry, ...]

    @property
    def fused(self) -> tuple[FusionEntry, ...]:
        """The modules that run fused."""
        return tuple(entry for entry in self.entries if not entry.reason)

    @property
    def left_alone(self) -> tuple[FusionEntry, ...]:
        """The modules that run as they did, with the reasons."""
        return tuple(entry for entry in self.entries if entry.reason)

    def __str__(self) -> str:
        if not self.entries:
            return (
                "no gated MLP was found, and no norm that linears read; give other names by hand:\n"
                "fuse(model, mlp={pattern: (gate, up, down, activation)}, norm={pattern: linears})"
            )
        rows = collapse(
            (e.name or "(model)", e.kind, e.computes, e.reason or "fused") for e in self.entries
        )
        summary = f"{len(self.fused)} fused, {len(self.left_alone)} left alone"
        return text_table(("module", "class", "computes", "result"), rows) + "\n" + summary
