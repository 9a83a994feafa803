"""Results on disk: JSON with everything needed to reproduce a number; filters and means of rows."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "results"
CARDS = ("h200", "h100")
"""Folders of results below :data:`FOLDER`, by the card; those of an H200 are in FOLDER itself."""

SMOKE_FOLDER = Path("runs/benchmarks")
"""Where smoke runs write: they are no results."""

ONE_THREAD, AUTOGRAD = "in the calling thread", "in autograd's threads"
"""Where the backward of a result ran. The latter is torch's default, and what results without the
entry have; the former saves host time (docs/faq.md)."""

Row = dict[str, Any]


def of_card(card: str, folder: Path | None = None) -> Path:
    """The folder for results of a card, one of :data:`CARDS`, below ``folder``."""
    folder = FOLDER if folder is None else folder
    return folder if card == CARDS[0] else folder / card


def card() -> str:
    """The one of :data:`CARDS` that is the current GPU; the first for any other."""
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((card for card in CARDS if card in name), CARDS[0])


def here() -> Path:
    """The folder for results of the current GPU."""
    return of_card(card())


def command(name: str) -> str:
    """Return the command that makes ``name.json``."""
    return f"python -m benchmarks {name}"


def environment(name: str) -> dict[str, str]:
    """Device, versions and date of this run, and the command that repeats it."""
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "absent"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    peers = {d.name: d.version for d in importlib.metadata.distributions() if d.name == "torchao"}
    return {
        "device": device or platform.machine(),
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "cuda": torch.version.cuda or "absent",
        "command": command(name),
        "backward": ONE_THREAD if not torch.autograd.is_multithreading_enabled() else AUTOGRAD,
        **peers,
    }


def write(
    name: str, rows: list[Row], folder: Path = FOLDER, *, partial: bool = False, **extra: Any
) -> Path:
    """Write ``name.json`` atomically: environment, any ``extra`` facts, and the rows.

    A fact ``environment`` is added to the environment, or replaces what this process has now.

    ``partial`` rows go to ``name.partial.json``, which the whole ones replace: what a run that is
    killed has measured is not lost.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{name}.partial.json"
    target = unfinished if partial else folder / f"{name}.json"
    about = environment(name) | extra.pop("environment", {})
    content = json.dumps({"environment": about, **extra, "rows": rows}, indent=1)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
        file.write(content + "\n")
    os.replace(file.name, target)
    if not partial:
        unfinished.unlink(missing_ok=True)
    return target


def load(name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """The content of ``name.json``, or None where it has not been made."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    return content


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
