"""Results of ``long_run.py``, condensed to two tables that hold all runs.

``runs.json`` has a record of each run: its command, seed, versions, and held-out losses.
``curves.csv`` has a row for every ``EVERY`` steps of a run: the mean loss, and the largest norm of
the gradient.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

Result = dict[str, Any]

EVERY = 20
"""Steps that a point of a condensed curve stands for."""

AFTER = 100
"""Steps at the start whose gradient norms do not count in the median."""

RUNS, CURVES = "runs.json", "curves.csv"

HEADER = ("run", "step", "loss", "norm")


def condensed(result: Mapping[str, Any]) -> Result:
    """Return a result whose curves have a point for every :data:`EVERY` steps.

    Args:
        result: the content of a ``result.json``, with ``loss`` and ``norm`` of each step. Other
            results are returned unchanged.
    """
    if "loss" not in result:
        return dict(result)
    starts = range(0, len(result["loss"]), EVERY)
    return {
        **result,
        "loss": [round(fmean(result["loss"][i : i + EVERY]), 4) for i in starts],
        "norm": [round(max(result["norm"][i : i + EVERY]), 4) for i in starts],
        "median_norm": round(median(result["norm"][AFTER:] or result["norm"]), 4),
    }


def steps_of(result: Mapping[str, Any]) -> list[float]:
    """Return the step in the middle of each point of the curves of a condensed result."""
    return [EVERY * (i + 0.5) for i in range(len(result["loss"]))]


def read_results(folder: Path) -> dict[str, Result]:
    """Return the condensed results of the tables in ``folder`` by name; none if there are none."""
    if not (folder / RUNS).exists():
        return {}
    results: dict[str, Result] = json.loads((folder / RUNS).read_text())
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with (folder / CURVES).open(newline="") as file:
        for row in csv.DictReader(file):
            curves[row["run"]].append((float(row["loss"]), float(row["norm"])))
    for name, points in curves.items():
        results[name] |= {"loss": [x for x, _ in points], "norm": [x for _, x in points]}
    return results


def write_results(folder: Path, results: Mapping[str, Result]) -> None:
    """Write condensed results into the tables in ``folder``, in the order of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    records = {}
    with (folder / CURVES).open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(HEADER)
        for name, result in sorted(results.items()):
            records[name] = {k: v for k, v in result.items() if k not in ("loss", "norm")}
            points = zip(result.get("loss", ()), result.get("norm", ()), strict=True)
            for i, (loss, norm) in enumerate(points, 1):
                table.writerow((name, EVERY * i, loss, norm))
    lines = (f"{json.dumps(name)}: {json.dumps(record)}" for name, record in records.items())
    (folder / RUNS).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def add_result(folder: Path, name: str, result: Mapping[str, Any]) -> None:
    """Add the content of a ``result.json`` to the tables in ``folder``."""
    write_results(folder, {**read_results(folder), name: condensed(result)})
