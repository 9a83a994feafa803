"""Plain-text tables for reports: no dependency, readable in a log file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to their widest cell, a rule under the header."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def collapse(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join rows that differ only in the numbers inside their first cell, a module name.

    ``blocks.0.mlp.up`` … ``blocks.7.mlp.up`` become ``blocks.*.mlp.up (8)``; order is kept.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in rows:
        groups.setdefault((re.sub(r"\d+", "*", name), *rest), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{pattern} ({len(names)})", *rest)
        for (pattern, *rest), names in groups.items()
    ]


def human_bytes(count: int) -> str:
    """A byte count with a binary unit, e.g. ``1.5 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
