"""``python -m benchmarks NAME``: measure, show a table, write ``benchmarks/results/NAME.json``.

Results of an H100 go to ``benchmarks/results/h100/``. ``all`` measures everything. ``check`` says
which bars of ``thresholds.json`` the results hold, ``plot`` draws them into ``docs/plots``,
``page`` puts them into docs/results/ and README.md: these three need no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import (
    block,
    cast,
    check,
    experts,
    fsdp2,
    gemm,
    grouped,
    head,
    hf_llama,
    host,
    layer,
    linear,
    lora,
    memory,
    plots,
    popular,
    producers,
    ranks,
    results,
    results_page,
    saved,
    shards,
    small,
    tiles,
    toolchain,
)
from .results import Row, columns

# A benchmark is a module with measure(**arguments), which yields rows. It may have: QUICK, the
# arguments of a smoke run; facts(), which the JSON holds beside the rows; publish(rows), which
# hands them to the library; GPUS, how many it needs if not one.
BENCHMARKS: dict[str, Any] = {
    "gemm": gemm,
    "cast": cast,
    "producers": producers,
    "linear": linear,
    "small": small,
    "block": block,
    "layer": layer,
    "host": host,
    "memory": memory,
    "saved": saved,
    "lora": lora,
    "grouped": grouped,
    "experts": experts,
    "head": head,
    "hf_llama": hf_llama,
    "popular": popular,
    "shards": shards,
    "fsdp2": fsdp2,
    "tensor_parallel": ranks.TENSOR_PARALLEL,
    "expert_parallel": ranks.EXPERT_PARALLEL,
    "context_parallel": ranks.CONTEXT_PARALLEL,
    "qwen3": ranks.QWEN3,
    "tiles": tiles,
    "toolchain": toolchain,
}


def _cell(value: object) -> str:
    if isinstance(value, list):
        return f"{len(value)} numbers"
    return "–" if value is None else str(value)


def _table(name: str, rows: Sequence[Row]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=name, box=SIMPLE, padding=(0, 1, 0, 0))
    shown = [c for c in columns(rows) if any(row.get(c) not in (None, "") for row in rows)]
    for column in shown:
        table.add_column(column.replace("_", " "))  # long names may break
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in shown))
    return table


def _measure(
    name: str, quick: bool, folder: Path, console: Any
) -> tuple[list[Row], dict[str, Any]]:
    """The rows of one benchmark, with a line that counts them, and the facts beside them."""
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    module = BENCHMARKS[name]
    arguments = getattr(module, "QUICK", {}) if quick else {}
    rows: list[Row] = []
    with Progress(
        TextColumn("{task.description}"),
        TextColumn("{task.completed} rows"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task(name, total=None, last="")
        for row in module.measure(**arguments):
            rows.append(row)
            results.write(name, rows, folder, partial=True)
            last = " ".join(str(value) for value in list(row.values())[:6])
            progress.update(task, advance=1, last=last)
    return rows, module.facts() if hasattr(module, "facts") else {}


def _run(names: Sequence[str], quick: bool, folder: Path) -> int:
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA GPU: none found", file=sys.stderr)
        return 2
    from rich.console import Console

    console = Console(width=200)
    needed = {name: getattr(BENCHMARKS[name], "GPUS", 0) for name in names}
    possible = [name for name in names if needed[name] <= torch.cuda.device_count()]
    for name in names:
        if name not in possible:
            print(f"{name} needs {needed[name]} GPUs: not measured", file=sys.stderr)
    for name in possible:
        with torch.autograd.set_multithreading_enabled(False):  # as torchtitan does; docs/faq.md
            rows, facts = _measure(name, quick, folder, console)
            written = results.write(name, rows, folder, **facts)
        console.print(_table(name, rows))
        for peer, reason in facts.get("absent", {}).items():
            console.print(f"absent: {peer} ({reason})", markup=False)
        console.print(f"written to {written}", markup=False)
        if hasattr(BENCHMARKS[name], "publish") and not quick:
            console.print(f"published to {BENCHMARKS[name].publish(rows)}", markup=False)
    return 0 if possible else 2


def _check(folder: Path) -> int:
    from rich.console import Console

    found = check.verdicts(check.load_bars(), folder)
    Console(width=160).print(check.table(found))
    failed = sum(verdict.holds is False for verdict in found)
    print(f"{failed} of {len(found)} bars do not hold" if failed else "every bar holds")
    return 0 if check.passed(found) else 1


def _plot(folder: Path) -> int:
    for path in plots.draw(folder):
        print(f"drawn: {path}")
    for name in plots.missing(folder):
        print(f"{name}.json is missing: {results.command(name)}")
    return 0


def _folder(quick: bool, measures: bool) -> Path:
    if quick:
        return results.SMOKE_FOLDER
    return results.here() if measures else results.FOLDER


def main(argv: list[str] | None = None) -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=[*BENCHMARKS, "all", "check", "plot", "page"])
    parser.add_argument("--out", type=Path, help="folder of the JSON, to write or to read")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"smoke run: a shape or two, few rounds; no results, so into {results.SMOKE_FOLDER}",
    )
    options = parser.parse_args(argv)
    measures = options.name in (*BENCHMARKS, "all")
    folder: Path = options.out or _folder(options.quick, measures)
    if options.name == "page":
        for page in results_page.PAGES:
            done = "updated" if page.update() else "is up to date"
            print(f"{page.path.relative_to(results_page.ROOT)} {done}")
        return 0
    if options.name in ("check", "plot") or torch.cuda.is_available():
        try:
            importlib.import_module("matplotlib" if options.name == "plot" else "rich")
        except ImportError as error:
            print(f"benchmarks need {error.name}: pip install '.[demo]'", file=sys.stderr)
            return 2
    if options.name == "check":
        return _check(folder)
    if options.name == "plot":
        return _plot(folder)
    names = list(BENCHMARKS) if options.name == "all" else [options.name]
    return _run(names, options.quick, folder)


if __name__ == "__main__":
    sys.exit(main())
