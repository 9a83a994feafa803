"""Options and report of examples that cut a Llama between ranks: tp_llama.py, pp_llama.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


def parser_of(
    prog: str, description: str, epilog: str, models: Iterable[str], batch: int
) -> argparse.ArgumentParser:
    """Return the parser of the options that both have; ``batch``: the default."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=tuple(models), default="tiny", help="sizes: Llama 3's 1B and 8B")
    add("--precision", choices=("bf16", "fp8"), default="bf16", help="of linears (default: bf16)")
    add("--seq", type=int, default=256, help="tokens of a sequence (default: 256)")
    add("--batch", type=int, default=batch, help=f"sequences of a step (default: {batch})")
    add("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    add("--warmup-steps", type=int, default=3, help="first steps, not timed (default: 3)")
    add("--lr", type=float, default=1e-3, help="learning rate (default: 1e-3)")
    add("--seed", type=int, default=0, help="decides weights and data (default: 0)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--out", type=Path, help="folder of result.json")
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a command line, checked."""
    options = parser.parse_args(argv)
    if not 0 <= options.warmup_steps < options.steps:
        parser.error(f"--warmup-steps must be from 0 to {options.steps - 1}: a step is timed")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return options


def written(options: argparse.Namespace) -> dict[str, Any]:
    """Return options as JSON holds them."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}


def report(
    result: dict[str, Any],
    rows: Iterable[tuple[str, str]],
    out: Path | None,
    more: Iterable[tuple[str, str]] = (),
) -> None:
    """Print what all results have, ``rows`` between and ``more`` after; write the result."""
    drawn, losses = Table("what", "value"), result["losses"]
    drawn.add_row(
        "precision", f"{result['options']['precision']}, {result['fp8_linears']} FP8 linears"
    )
    for row in (
        *rows,
        ("loss", f"{losses[0]:.4f} at first, {losses[-1]:.4f} at last"),
        ("tokens/s", f"{result['tokens_per_second']:,.0f}"),
        *more,
    ):
        drawn.add_row(*row)
    Console().print(drawn)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
