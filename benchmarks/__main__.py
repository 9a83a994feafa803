"""``python -m benchmarks NAME``: measure, show a table, write ``benchmarks/results/NAME.json``.

``readme`` measures nothing: it puts the results on disk into the README.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from . import cast, linear, memory, readme, results

BENCHMARKS = {"linear": linear, "cast": cast, "memory": memory}


def _table(name: str, rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title=name)
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    return table


def main(argv: list[str] | None = None) -> int:
    """Run the benchmarks named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=[*BENCHMARKS, "all", "readme"])
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the JSON")
    options = parser.parse_args(argv)
    if options.name == "readme":
        print("README.md updated" if readme.update() else "README.md is up to date")
        return 0
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA GPU: none found", file=sys.stderr)
        return 2
    try:
        from rich.console import Console
    except ImportError:
        print("benchmarks need rich: pip install 'blocktensor[demo]'", file=sys.stderr)
        return 2
    console = Console(width=160)
    for name in BENCHMARKS if options.name == "all" else [options.name]:
        rows: list[dict[str, Any]] = []
        with console.status(f"{name} …") as status:
            for row in BENCHMARKS[name].measure():
                rows.append(row)
                status.update(f"{name}: {len(rows)} rows, last {list(row.values())[:4]}")
        console.print(_table(name, rows))
        console.print(f"written to {results.write(name, rows, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
