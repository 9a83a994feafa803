"""Lay out tables for reports, as plain text and HTML, without dependencies."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import takewhile, zip_longest
from typing import Any, NamedTuple

# Where a cell may break: after spaces and commas, and between the parts of a name, but not inside
# of a number.
BREAK = re.compile(r"(?<=[ ,])(?=[^ ])|(?<=[A-Za-z_*][.:])(?=\S)|(?<=\.)(?=[A-Za-z_*{])")


class Table(NamedTuple):
    """A table; ``str`` pads columns to their widest cell and underlines the header.

    In a terminal that is narrower, cells break.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __str__(self) -> str:
        cells = [[str(cell) for cell in row] for row in (self.header, *self.rows)]
        widths = _widths(cells, terminal_width())
        head, *body = (_lines(row, widths) for row in cells)
        rule = "  ".join("-" * width for width in widths)
        return "\n".join((*head, rule, *(line for lines in body for line in lines)))

    def html(self) -> str:
        """Return the table as HTML, aligned to the left: notebooks would align it to the right."""
        head, *body = (
            "<tr>"
            + "".join(f'<{tag} style="text-align: left">{_escaped(cell)}</{tag}>' for cell in row)
            + "</tr>"
            for tag, rows in (("th", [self.header]), ("td", self.rows))
            for row in rows
        )
        lines = "\n".join(body)
        style = 'style="margin-bottom: 1em"'
        return f"<table {style}>\n<thead>{head}</thead>\n<tbody>\n{lines}\n</tbody>\n</table>"


class Report:
    """A report of tables and lines of text, for ``print``, notebooks, and JSON."""

    def _parts(self) -> Sequence[Table | str]:
        """Return the tables and lines of the report, in order."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(
            str(part) if isinstance(part, Table) else filled(part) for part in self._parts()
        )

    def _repr_html_(self) -> str:
        return "\n".join(
            part.html() if isinstance(part, Table) else f"<p>{_escaped(part)}</p>"
            for part in self._parts()
            if part
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, not rounded, as values that ``json.dumps`` takes.

        The keys are the names of attributes, and the keys of dictionaries. Tuples become lists,
        named tuples dictionaries, and dtypes their names.
        """
        values: dict[str, Any] = plain(self)
        return values


def _escaped(text: object) -> str:
    return escape(str(text), quote=False)


def terminal_width() -> int | None:
    """Return the columns of the terminal that ``print`` writes to; None for files and notebooks."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (AttributeError, OSError, ValueError):  # stdout is None, replaced, or no terminal
        return None


def filled(text: str) -> str:
    """Return text whose lines break at spaces where the terminal is narrower."""
    width = terminal_width()
    if width is None:
        return text
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )


def _widths(cells: Sequence[Sequence[str]], limit: int | None) -> list[int]:
    """Return the widths of columns, with the widest narrowed until a row fits in ``limit``."""
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if limit is None:
        return widths
    least = [max(len(x.rstrip()) for cell in c for x in BREAK.split(cell)) for c in columns]
    # Break headers first: this adds a line to the table, a broken cell a line to its row.
    with_cells = [max([n, *map(len, c[1:])]) for n, c in zip(least, columns, strict=True)]
    for floors in (with_cells, least):
        while _row_width(widths) > limit and widths != floors:
            widest = max((w, i) for i, w in enumerate(widths) if w > floors[i])[1]
            widths[widest] -= 1
    return widths


def _row_width(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Return the lines of a row, whose cells break at the widths of their columns."""
    broken = [_broken(cell, width) for cell, width in zip(row, widths, strict=True)]
    return [
        "  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip()
        for line in zip_longest(*broken, fillvalue="")
    ]


def _broken(cell: str, width: int) -> list[str]:
    lines = [""]
    for part in BREAK.split(cell):
        if len((lines[-1] + part).rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]


def plain(value: Any) -> Any:
    """Convert a value to JSON types; an object becomes a dict of its attributes and properties.

    Properties that return tuples are left out: they repeat entries of an attribute. So are those
    that return an object of the same class, which has such a property too.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, (tuple, list)):
        named = getattr(value, "_asdict", None)
        return [plain(x) for x in value] if named is None else plain(named())
    if not hasattr(value, "__dict__"):
        return str(value).removeprefix("torch.")
    names = [x for x in dict.fromkeys((*vars(value), *dir(value))) if not x.startswith("_")]
    found = {name: getattr(value, name) for name in names}
    return {
        name: plain(x)
        for name, x in found.items()
        if not callable(x) and (name in vars(value) or not isinstance(x, (tuple, type(value))))
    }


def collapse(
    rows: Iterable[tuple[Any, ...]], add: int | None = None, across: bool = False
) -> list[tuple[Any, ...]]:
    """Join rows that differ only in the numbers inside their first cell, a module name.

    ``blocks.0.mlp.up`` … ``blocks.7.mlp.up`` become ``blocks.*.mlp.up (8)``; order is kept. The
    empty name of a model becomes ``(model)``.

    Args:
        rows: each a name and other cells.
        add: the index of a column in which rows may differ; its numbers are summed.
        across: also join different names: ``blocks.0.q``, ``blocks.0.up``, ``blocks.1.q`` … become
            ``blocks.*.{q, up} (4)``.
    """
    groups: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for name, *cells in rows:
        row = name or "(model)", *cells
        others = [cell for i, cell in enumerate(row[1:], 1) if i != add]
        groups.setdefault((None if across else pattern(row[0]), *others), []).append(row)
    joined = []
    for group in groups.values():
        cells = [_names([row[0] for row in group]), *group[0][1:]]
        if add is not None:
            cells[add] = sum(row[add] for row in group)
        joined.append(tuple(cells))
    return joined


def _names(names: list[str]) -> str:
    """Summarize names: one pattern for each kind, and their common parts once."""
    if len(names) == 1:
        return names[0]
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(pattern(name), []).append(name)
    patterns = [tuple(_common(group).split(".")) for group in alike.values()]
    return f"{_in_braces(patterns)} ({len(names)})"


def _in_braces(names: Sequence[tuple[str, ...]]) -> str:
    """Join names, given as parts: ``a.q.w``, ``a.k.w``, ``b`` become ``a.{q, k}.w, b``."""
    if len(names) == 1:
        return ".".join(names[0])
    inside = min(map(len, names)) - 1  # leave at least one part that differs
    first = _equal_parts(names, inside)
    last = _equal_parts([name[::-1] for name in names], inside - first)
    groups: dict[str, list[tuple[str, ...]]] = {}
    for name in names:
        middle = name[first : len(name) - last]
        groups.setdefault(middle[0], []).append(middle)
    joined = ", ".join(
        _in_braces(group) if len(groups) > 1 else ", ".join(map(".".join, group))
        for group in groups.values()
    )
    if not first + last:
        return joined
    return ".".join((*names[0][:first], f"{{{joined}}}", *names[0][len(names[0]) - last :]))


def _equal_parts(names: Sequence[tuple[str, ...]], most: int) -> int:
    """Return how many parts, ``most`` at most, all names begin with."""
    parts = zip(*(name[:most] for name in names), strict=True)
    return sum(1 for _ in takewhile(lambda part: len(set(part)) == 1, parts))


def pattern(name: str) -> str:
    """Return the name with ``*`` for every number, so that similar layers are equal."""
    return re.sub(r"\d+", "*", name)


def _common(names: list[str]) -> str:
    """Join names of one pattern to one name, with ``*`` for each number that differs."""
    parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def human_bytes(count: int) -> str:
    """Return a byte count with a binary unit, e.g. ``1.5 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
