"""Report an audit: every matmul that ran, the share of each precision, and a check for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ..model.names import check_patterns, ends_of, matching, meant_by
from ..text_table import Report, Table, collapse, pattern

FP8 = "FP8"
"""The name of the precision of this library's matmuls."""

BY_RECIPE = "in high precision by recipe"
"""The note on gradients in high precision that ``Recipe(wgrad_input=..., backward=...)`` asks for.
"""

OUTER_PRODUCT = "outer product"
"""The note on a matmul of K = 1 that reads no parameter, such as positions by frequencies."""

LEAVE_IT = ": leave it"
"""The end of the remedy for matmuls of adapters, and for others that are as thin."""

Name = TypeVar("Name")

_NAMED = 4  # the most groups that the totals list for one precision


@dataclass(frozen=True)
class AuditedMatmul:
    """One matmul, ``[M, N]`` output with contraction K, or ``batch`` of them.

    Attributes:
        module: fully qualified name of the module whose forward called it; in the backward, of the
            forward that it belongs to. ``(model)``: outside of any submodule.
        kind: ``fprop``, ``dgrad`` or ``wgrad`` in FP8, else ``forward`` or ``backward``.
        batch, m, n, k: its shape. Of attention: batch times heads, queries, keys, size of a head.
        precision: ``FP8``, or the dtype of its operands: ``bf16``, ``fp16``, ``fp32``, ...
        flops: 2 per multiplication and addition; attention counts without masks.
        attention: True for attention, and for a batched matmul of two activations.
        recomputed: True if activation checkpointing ran it again in the backward.
        reason: why it should have been FP8; empty if it is, or if nothing says that it should.
        note: why it is meant to be in high precision: ``wgrad_input`` or ``backward`` of a Recipe
            asks for it, or it is an outer product (K = 1) that reads no parameter. Else empty.
        weight: in high precision, the name of the parameter or buffer that it or, in the backward,
            its forward reads; else empty.
        remedy: why that parameter is not in FP8, and how to convert it; or empty.
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
    weight: str = ""
    remedy: str = ""


class HiddenMatmuls(NamedTuple):
    """An op that may run matmuls which an audit cannot see.

    Attributes:
        op: its name.
        module: the module that called it.
        weight: name of a parameter of two dimensions or more that it reads; or empty.
    """

    op: str
    module: str
    weight: str = ""

    def __str__(self) -> str:
        return f"{self.op} in {self.module}"


@dataclass(frozen=True)
class AuditReport(Report):
    """The result of :func:`audit`; ``print(report)`` shows it as a table.

    Attributes:
        entries: every matmul, in the order in which they ran.
        notes: facts that the table does not show, such as ops that hide their matmuls.
        hidden: the ops that may run unseen matmuls.
    """

    entries: tuple[AuditedMatmul, ...]
    notes: tuple[str, ...] = ()
    hidden: tuple[HiddenMatmuls, ...] = ()

    @property
    def flops(self) -> int:
        """FLOPs of all matmuls."""
        return sum(e.flops for e in self.entries)

    @property
    def fp8_share(self) -> float:
        """The part of all FLOPs that ran in FP8, from 0 to 1."""
        return self.by_precision().get(FP8, 0.0)

    @property
    def marked(self) -> tuple[AuditedMatmul, ...]:
        """The matmuls that should have been FP8 and were not, each with its reason."""
        return tuple(e for e in self.entries if e.reason)

    def assert_fp8(self, except_for: Sequence[str] = (), *, fp8_share: float | None = None) -> None:
        """Raise unless every matmul with a weight ran in FP8; for tests of a model.

        Attention, batched matmuls of two activations, what a ``note`` explains, and matmuls whose
        ``remedy`` is to leave them (adapters, and others as thin) may run in high precision. With
        ``fp8_share`` other matmuls may, too, as long as FP8 has this share of all FLOPs; those that
        should have been FP8 (:attr:`marked`) and ops that may hide matmuls still raise.

        Args:
            except_for: modules that may run in high precision with all modules below them:
                shell-style patterns of names, as in ``skip`` of :func:`blocktensor.convert`, e.g.
                ``["lm_head", "*.router"]``. ``"(model)"`` is outside of any submodule.
            fp8_share: above 0 and at most 1. FLOPs of attention count, and FLOPs of ``except_for``
                do not.

        Raises:
            AssertionError: a matmul with a weight ran in high precision, an op may hide one, or no
                matmul ran in FP8, or FP8 has a smaller share. The message names the modules, and
                what would convert them.
            TypeError: ``except_for`` is no list of str, or ``fp8_share`` no number.
            ValueError: a pattern in ``except_for`` names no module of this report; ``fp8_share`` is
                not above 0 and at most 1.
        """
        patterns = check_patterns(except_for, "except_for", "lm_head")
        names = [*(x.module for x in self.entries), *(x.module for x in self.hidden)]
        unknown = [x for x in patterns if not any(matching(name, [x]) for name in names)]
        if unknown:
            raise ValueError(
                f"except_for pattern {unknown[0]!r} matches no module that ran a matmul: expected "
                f"a pattern of the names in this report or of modules above them; these names end "
                f"in {ends_of(names)}{meant_by(unknown[0], list(dict.fromkeys(names)))}"
            )
        counted = [entry for entry in self.entries if not matching(entry.module, patterns)]
        hidden = [x for x in self.hidden if x.weight and not matching(x.module, patterns)]
        missed = "" if fp8_share is None else _missed(fp8_share, counted)
        all_must = fp8_share is None or missed
        # a share that is missed is explained by all that is in high precision
        entries = [
            entry
            for entry in counted
            if entry.reason or (all_must and _why(entry) and (missed or not _is_to_be_left(entry)))
        ]
        lines = [str(self._in_high_precision(entries))] if entries else []
        lines += [f"{missed}. All matmuls: {self._totals()}"] if missed else []
        lines += [f"{x}, reads {x.weight}, and may run matmuls that are not shown" for x in hidden]
        if not any(entry.precision == FP8 for entry in self.entries):
            lines.insert(0, f"no matmul ran in {FP8}")
        if lines:
            allowed = "; except_for=[...] names modules that may run so" if entries else ""
            raise AssertionError("\n".join([f"matmuls that did not run in FP8{allowed}:", *lines]))

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
            return ["no matmul ran", *self.notes]
        parts: list[Table | str] = [self._table(), self._totals()]
        if self.marked:
            share = sum(e.flops for e in self.marked) / max(self.flops, 1)
            parts.append(f"should have been FP8 and was not: {share:.1%} of FLOPs")
        explained = [e for e in self.entries if e.remedy]
        if explained:
            parts += "", self._in_high_precision(explained)
        return [*parts, *self.notes]

    def _in_high_precision(self, entries: Iterable[AuditedMatmul]) -> Table:
        """Return the modules of entries that are not in FP8, with the reasons."""
        groups = self._shares(((e.module, _why(e)), e.flops) for e in entries)
        rows = collapse(((*group, share) for group, share in groups.items()), add=2, across=True)
        header = "in high precision", "FLOPs", "why"
        return Table(header, [(name, f"{share:.1%}", why) for name, why, share in rows])

    def _table(self) -> Table:
        order = list(dict.fromkeys(pattern(e.module) for e in self.entries))
        entries = sorted(self.entries, key=lambda e: order.index(pattern(e.module)))
        rows = [
            (*cells, f"{flops / max(self.flops, 1):.1%}", reason)
            for *cells, flops, reason in collapse(map(_cells, entries), add=4)
        ]
        header = ("module", "matmul", "M x N x K", "precision", "FLOPs", "should be FP8")
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


def _missed(fp8_share: float, counted: Iterable[AuditedMatmul]) -> str:
    """Return by how much matmuls in FP8 miss a share of FLOPs; empty if they do not.

    Raises:
        TypeError, ValueError: ``fp8_share`` is no share.
    """
    if isinstance(fp8_share, bool) or not isinstance(fp8_share, (int, float)):
        raise TypeError(f"fp8_share={fp8_share!r}: expected a number, e.g. 0.9 for 90% of FLOPs")
    if not 0 < fp8_share <= 1:
        raise ValueError(f"fp8_share={fp8_share}: expected a share above 0 and at most 1, e.g. 0.9")
    flops: Counter[bool] = Counter()
    for entry in counted:
        flops[entry.precision == FP8] += entry.flops
    share = flops[True] / max(flops.total(), 1)
    if share >= fp8_share:
        return ""
    return f"FP8 has {share:.1%} of FLOPs, and fp8_share asks for {fp8_share:.1%}"


def _why(entry: AuditedMatmul) -> str:
    """Return why a matmul ran in high precision; empty if it is meant to."""
    if entry.precision == FP8 or entry.attention or entry.note:
        return ""
    no_weight = f"reads the buffer {entry.weight}" if entry.weight else "reads no parameter"
    return entry.reason or entry.remedy or no_weight


def _is_to_be_left(entry: AuditedMatmul) -> bool:
    return entry.remedy.endswith(LEAVE_IT)


def _cells(entry: AuditedMatmul) -> tuple[Any, ...]:
    kind = f"attention {entry.kind}" if entry.attention else f"{entry.kind} {entry.note}".rstrip()
    shape = f"{entry.m} x {entry.n} x {entry.k}"
    return (
        entry.module,
        f"{kind}, recomputed" if entry.recomputed else kind,
        shape if entry.batch == 1 else f"{entry.batch} x ({shape})",
        entry.precision,
        entry.flops,
        entry.reason.replace(entry.weight, pattern(entry.weight)) if entry.weight else entry.reason,
    )


def _group(entry: AuditedMatmul, others: Iterable[AuditedMatmul]) -> str:
    """Return the name in totals: the entry's module, or the pattern of all modules of its kind."""
    if entry.attention:
        return "attention scores"
    if entry.note:
        return f"{entry.kind} {entry.note}"
    alike = pattern(entry.module)
    modules = {x.module for x in others if pattern(x.module) == alike and not x.note}
    return alike if len(modules) > 1 else entry.module
