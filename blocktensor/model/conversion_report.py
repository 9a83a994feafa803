"""The report of a conversion: one entry for every linear and embedding, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..text_table import collapse, human_bytes, text_table


@dataclass(frozen=True)
class SmallKN:
    """Sizes below which FP8 is slower: ``[N, K]`` is skipped if N < n, K < k or N K < size.

    The defaults come from ``python -m benchmarks small`` on an H200: from these sizes on, FP8 is
    faster in CUDA graphs at 4096 tokens, in eager mode at 16384 (docs/experiments/host_time.md).
    """

    n: int = 1024
    k: int = 1024
    size: int = 2048 * 2048

    def undercut(self, n: int, k: int) -> list[str]:
        """The sizes of a weight ``[n, k]`` that are too small, each with its threshold."""
        sizes = (("N", n, self.n), ("K", k, self.k), ("N K", n * k, self.size))
        return [f"{what}={found} < {least}" for what, found, least in sizes if found < least]


@dataclass(frozen=True)
class Entry:
    """One module's weight: ``converted`` or not, with the reason."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    converted: bool
    reason: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class ConversionReport:
    """The result of :func:`convert`; ``print(report)`` shows it as a table.

    ``bytes_after`` counts, for a trainable weight, the master and the FP8 form with scales (held
    from a forward to its backward), and for a frozen one the FP8 form only.
    """

    entries: tuple[Entry, ...]

    @property
    def converted(self) -> tuple[Entry, ...]:
        """The weights that now run in FP8."""
        return tuple(e for e in self.entries if e.converted)

    @property
    def skipped(self) -> tuple[Entry, ...]:
        """The linears and embeddings that were skipped, each with its reason."""
        return tuple(e for e in self.entries if not e.converted)

    @property
    def bytes_before(self) -> int:
        """Parameter bytes of all entries before conversion; tied weights count once."""
        return sum(e.bytes_before for e in self.entries)

    @property
    def bytes_after(self) -> int:
        """Parameter bytes of all entries after conversion; tied weights count once."""
        return sum(e.bytes_after for e in self.entries)

    def __str__(self) -> str:
        rows = collapse(
            (
                e.name,
                "x".join(str(s) for s in e.shape),
                str(e.dtype).removeprefix("torch."),
                "fp8" if e.converted else "-",
                e.reason,
            )
            for e in self.entries
        )
        summary = (
            f"{len(self.converted)} converted, {len(self.skipped)} skipped; parameters "
            f"{human_bytes(self.bytes_before)} before, {human_bytes(self.bytes_after)} after"
        )
        return text_table(("module", "weight", "dtype", "runs in", "why"), rows) + "\n" + summary
