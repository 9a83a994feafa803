"""What rows of results say together: filters, ratios of columns, means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .results import Row


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios.

    Raises:
        ValueError: there are no values, or one is not positive.
    """
    if not values or min(values) <= 0:
        raise ValueError(f"a geometric mean needs positive numbers, got {list(values)[:5]}")
    return math.exp(math.fsum(map(math.log, values)) / len(values))


REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "geometric mean": geometric_mean,
    "minimum": min,
    "maximum": max,
}


def select(rows: Iterable[Row], where: Mapping[str, Any]) -> list[Row]:
    """The rows whose columns have these values; a list of values means any of them."""

    def matches(row: Row) -> bool:
        return all(
            row.get(column) in (value if isinstance(value, list) else [value])
            for column, value in where.items()
        )

    return [row for row in rows if matches(row)]


def ratios(rows: Iterable[Row], value: str, over: str | None = None) -> list[float]:
    """Column ``value`` (divided by column ``over``) of the rows that have it."""
    found = []
    for row in rows:
        top, bottom = row.get(value), 1.0 if over is None else row.get(over)
        if top is not None and bottom is not None:
            found.append(top / bottom)
    return found


def columns(rows: Sequence[Row]) -> list[str]:
    """Every column of the rows, in the order they first appear in."""
    return list(dict.fromkeys(column for row in rows for column in row))
