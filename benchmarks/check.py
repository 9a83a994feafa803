"""``python -m benchmarks check``: which bars of ``thresholds.json`` the results on disk hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import results
from .results import REDUCTIONS, Row, ratios, select

FILE = Path(__file__).parent / "thresholds.json"


@dataclass(frozen=True)
class Bar:
    """One claim: a column of one result file, over another column, reduced to one number.

    ``rows`` is how many rows must match ``where``: fewer, as after a smoke run, prove nothing. Rows
    without the columns are left out ("where cuBLAS takes the shape"). ``optional`` is a bar whose
    column only some runs have. ``reason``: what was asked before, and what keeps it from holding.
    """

    id: str
    text: str
    result: str
    value: str
    reduce: str
    rows: int
    over: str | None = None
    where: dict[str, Any] = field(default_factory=dict)
    at_least: float | None = None
    at_most: float | None = None
    optional: bool = False
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"bar {self.id!r} needs one of at_least and at_most")
        if self.reduce not in REDUCTIONS:
            raise ValueError(f"bar {self.id!r}: reduce is one of {', '.join(REDUCTIONS)}")

    @property
    def limit(self) -> str:
        """Return the limit as text."""
        return f"≥ {self.at_least}" if self.at_least is not None else f"≤ {self.at_most}"

    def met_by(self, measured: float) -> bool:
        """Return True if this number holds the bar."""
        if self.at_least is not None:
            return measured >= self.at_least
        assert self.at_most is not None
        return measured <= self.at_most


@dataclass(frozen=True)
class Verdict:
    """The result of a bar; ``holds`` is None for an optional bar that was not measured."""

    bar: Bar
    measured: float | None
    holds: bool | None
    note: str = ""


def load_bars(path: Path = FILE) -> list[Bar]:
    """The bars of a thresholds file."""
    bars = [Bar(**entry) for entry in json.loads(path.read_text())["bars"]]
    ids = [bar.id for bar in bars]
    if len(set(ids)) < len(ids):
        raise ValueError(f"{path}: two bars share an id")
    return bars


def judge(bar: Bar, rows: Sequence[Row]) -> Verdict:
    """The verdict on one bar, from the rows of its result file."""
    matching = select(rows, bar.where)
    values = ratios(matching, bar.value, bar.over)
    if not values:
        missing = f"no row has {bar.value}" + (f" and {bar.over}" if bar.over else "")
        return Verdict(bar, None, None if bar.optional else False, missing)
    measured = REDUCTIONS[bar.reduce](values)
    if len(matching) < bar.rows:
        return Verdict(bar, measured, False, f"{len(matching)} of {bar.rows} rows measured")
    left_out = len(matching) - len(values)
    note = f"{left_out} of {len(matching)} rows lack {bar.over or bar.value}" if left_out else ""
    return Verdict(bar, measured, bar.met_by(measured), note)


def verdicts(bars: Sequence[Bar], folder: Path = results.FOLDER) -> list[Verdict]:
    """Every bar judged on the results in ``folder``; a missing file fails all of its bars."""
    found = []
    for bar in bars:
        content = results.load(bar.result, folder)
        if content is None:
            note = f"{bar.result}.json is missing: {results.command(bar.result)}"
            found.append(Verdict(bar, None, False, note))
        else:
            found.append(judge(bar, content["rows"]))
    return found


def table(found: Sequence[Verdict]) -> Any:
    """The verdicts as a rich table."""
    from rich.table import Table

    shown = Table(title="bars")
    for column in ("bar", "measured", "limit", "holds", "note"):
        shown.add_column(column, justify="right" if column in ("measured", "limit") else "left")
    answers = {True: "[green]yes[/]", False: "[red]no[/]", None: "not measured"}
    for verdict in found:
        measured = "–" if verdict.measured is None else f"{verdict.measured:.4g}"
        bar = verdict.bar
        shown.add_row(
            bar.text, measured, bar.limit, answers[verdict.holds], verdict.note or bar.reason
        )
    return shown


def passed(found: Sequence[Verdict]) -> bool:
    """Return True if no bar fails."""
    return all(verdict.holds is not False for verdict in found)
