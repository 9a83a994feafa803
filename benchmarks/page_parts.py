"""Pieces of the generated pages: tables, links to plots, and where a number comes from."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import plots
from .results import AUTOGRAD, CARDS, Row, load, of_card
from .shapes import label

LINE_LENGTH = 120
"""Characters of a line of text; rows of tables and links to plots may be longer."""

Content = dict[str, Any]
"""The content of a file of results."""


FIRST_ROWS, FOLDED_FROM = 6, 9
"""Rows of a table that stand open, and how many rows it has at least if others are folded."""


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table; of a long one, all but the first rows are folded."""
    head = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    if len(rows) < FOLDED_FROM:
        return head + lines
    first, more = lines[:FIRST_ROWS], lines[FIRST_ROWS:]
    return [*head, *first, "", *folded(f"{len(more)} more rows", [*head, *more])]


def folded(summary: str, lines: Sequence[str]) -> list[str]:
    """Lines that a reader unfolds, on the site and where the repository is browsed."""
    return [f'<details markdown="1"><summary>{summary}</summary>', "", *lines, "", "</details>"]


def wrapped(line: str) -> str:
    """``line`` as lines of text, without a break inside of words."""
    if line.startswith(("|", "![", "<")):
        return line
    return textwrap.fill(line, LINE_LENGTH, break_long_words=False, break_on_hyphens=False)


def source(content: Content, remark: str = "") -> str:
    """The command that made a result, and where and when it ran."""
    where = content["environment"]
    versions = f"torch {where['torch']}, Triton {where['triton']}"
    if "torchao" in where:
        versions += f", torchao {where['torchao']}"
    backward = where.get("backward", AUTOGRAD)
    ran = f"; the backward {backward}" if backward != AUTOGRAD else ""
    return (
        f"(`{where['command']}`, {where['device']}, {versions}, {where['date']}"
        f"{_recipe_of(content)}{ran}{remark})"
    )


def on_cards(name: str, first: Content) -> dict[str, Content]:
    """Return the results of this name by card, ``first`` among them."""
    found = {CARDS[0].upper(): first}
    for card in CARDS[1:]:
        content = load(name, of_card(card))
        if content is not None:
            found[card.upper()] = content
    return found


def _recipe_of(content: Content) -> str:
    """A remark that names the recipe of results that were measured with another default."""
    recipe = content["environment"].get("recipe")
    return f"; with `{recipe}`, then the default" if recipe else ""


def image(file: str, text: str, page: Path) -> list[str]:
    """A link from ``page`` to the plot, where it has been drawn."""
    if not (plots.FOLDER / file).exists():
        return []
    return [f"![{text}]({Path(os.path.relpath(plots.FOLDER, page.parent)).as_posix()}/{file})", ""]


def times(value: float | None) -> str:
    """A ratio."""
    return "–" if value is None else f"{value:.2f}x"


def shape_of(row: Row) -> str:
    """The linear layer that a row is about."""
    return label(row["m"], row["n"], row["k"])


def section(
    text: str,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    content: Content,
    remark: str = "",
    more: Sequence[str] = (),
) -> list[str]:
    """Lines of a result: a paragraph, a table, ``more`` lines, and where the numbers come from."""
    return [text, "", *table(header, rows), "", *more, source(content, remark)]


def not_installed(content: Content) -> str:
    """A remark that names the peers that were absent."""
    absent = ", ".join(sorted(content.get("absent", {})))
    return f"; not installed there: {absent}" if absent else ""
