"""Report an audit: every matmul that ran, and the share of each precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..text_table import Report, Table, collapse, pattern

FP8 = "FP8"
"""The precision of matmuls by this library's ops."""

BY_RECIPE = "in high precision by recipe"
"""The note on weight gradients with ``Recipe(wgrad_input="high_precision")``."""

Name = TypeVar("Name")

_NAMED = 4  # the most groups that the totals name for one precision


@dataclass(frozen=True)
class AuditedProduct:
    """One matmul, ``[M, N]`` output with contraction K, or ``batch`` of them.

    Attributes:
        module: fully qualified name of the module whose forward called it; in the backward, of the
            forward that it belongs to. ``(model)``: outside of any submodule.
        kind: ``fprop``, ``dgrad`` or ``wgrad`` in FP8, else ``forward`` or ``backward``.
        batch, m, n, k: its shape. Of attention: batch times heads, queries, keys, size of a head.
        precision: ``FP8``, or the dtype of its operands: ``bf16``, ``fp16``, ``fp32``, ...
        flops: 2 per multiplication and addition; masks of attention save none.
        attention: it is attention, or a batched matmul of two activations.
        recomputed: activation checkpointing ran it again in the backward.
        reason: why it should have been FP8; empty if it is, or if nothing says that it should.
        note: that ``Recipe(wgrad_input="high_precision")`` asks for this weight gradient; or empty.
    """

    module: str
    kind: str
    batch: int
    m: int
    n: int
    k: int
    precision: str
    flops: int
    attention: bool = False
    recomputed: bool = False
    reason: str = ""
    note: str = ""


@dataclass(frozen=True)
class AuditReport(Report):
    """The result of :func:`audit`; ``print(report)`` shows it as a table.

    Attributes:
        entries: every matmul, in the order in which they ran.
        notes: facts that the table does not show, such as ops that hide their matmuls.
    """

    entries: tuple[AuditedProduct, ...]
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """FLOPs of all matmuls."""
        return sum(e.flops for e in self.entries)

    @property
    def fp8_share(self) -> float:
        """The part of all FLOPs that ran in FP8, from 0 to 1."""
        return self.by_precision().get(FP8, 0.0)

    @property
    def marked(self) -> tuple[AuditedProduct, ...]:
        """The matmuls that should have been FP8 and were not, each with its reason."""
        return tuple(e for e in self.entries if e.reason)

    def by_precision(self) -> dict[str, float]:
        """Return the share of FLOPs of each precision, the largest first; the shares sum to 1."""
        return self._shares((e.precision, e.flops) for e in self.entries)

    def _shares(self, named: Iterable[tuple[Name, int]]) -> dict[Name, float]:
        flops: Counter[Name] = Counter()
        for name, count in named:
            flops[name] += count
        return {name: count / max(self.flops, 1) for name, count in flops.most_common()}

    def _parts(self) -> list[Table | str]:
        if not self.entries:
            return ["no matrix product ran", *self.notes]
        parts: list[Table | str] = [self._table(), self._totals()]
        if self.marked:
            share = sum(e.flops for e in self.marked) / max(self.flops, 1)
            parts.append(f"should have been FP8 and was not: {share:.1%} of FLOPs")
        return [*parts, *self.notes]

    def _table(self) -> Table:
        order = list(dict.fromkeys(pattern(e.module) for e in self.entries))
        entries = sorted(self.entries, key=lambda e: order.index(pattern(e.module)))
        rows = [
            (*cells, f"{flops / max(self.flops, 1):.1%}", reason)
            for *cells, flops, reason in collapse(map(_cells, entries), add=4)
        ]
        header = ("module", "product", "M x N x K", "precision", "FLOPs", "should be FP8")
        columns = len(header) if self.marked else len(header) - 1
        return Table(header[:columns], [row[:columns] for row in rows])

    def _totals(self) -> str:
        parts = [f"{FP8}: {self.fp8_share:.1%} of FLOPs"]
        for precision in self.by_precision():
            if precision != FP8:
                others = [e for e in self.entries if e.precision == precision]
                shares = self._shares((_group(e, others), e.flops) for e in others)
                groups = [f"{name} {share:.1%}" for name, share in shares.items()]
                if len(groups) > _NAMED + 1:
                    groups[_NAMED:] = [f"{len(groups) - _NAMED} others"]
                parts.append(f"{precision}: {', '.join(groups)}")
        return "; ".join(parts)


def _cells(e: AuditedProduct) -> tuple[Any, ...]:
    kind = f"attention {e.kind}" if e.attention else f"{e.kind} {e.note}".rstrip()
    shape = f"{e.m} x {e.n} x {e.k}"
    return (
        e.module,
        f"{kind}, recomputed" if e.recomputed else kind,
        shape if e.batch == 1 else f"{e.batch} x ({shape})",
        e.precision,
        e.flops,
        pattern(e.reason),
    )


def _group(e: AuditedProduct, others: Iterable[AuditedProduct]) -> str:
    """Return the name of ``e`` in totals: its module, or the pattern of all modules of its kind."""
    if e.attention:
        return "attention scores"
    if e.note:
        return f"{e.kind} {e.note}"
    alike = pattern(e.module)
    modules = {x.module for x in others if pattern(x.module) == alike and not x.note}
    return alike if len(modules) > 1 else e.module
