"""Compare the runs of ``long_run.py``: a table in Markdown, and their curves.

    python examples/long_run_report.py RESULT.json ... --out runs/report.md

writes the page, and ``plots/evidence_dense.svg`` and ``plots/evidence_moe.svg`` next to it.
``--ablation FILE ...``: with the runs of ``ablation.py``, of one seed or more in a file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from ablation import Outcome, table
from common.curves import EVERY, condensed, steps_of
from common.records import smooth
from kernel_text import PACKAGE

Result = dict[str, Any]
SMOOTHED = 100
"""Steps that a point of a smoothed curve is the mean of."""
MOVED = (
    "Runs that differ by rounding alone come apart as well: those whose weights were moved by 1e-6 "
    "of",
    "themselves show how far.",
)


def heldout(result: Result) -> float:
    """The last held-out loss."""
    return float(result["heldout"][-1][1])


def of_bf16(result: Result, results: Sequence[Result]) -> Result | None:
    """The run in bf16 of the same model and seed."""
    alike = ("seed", "experts", "parameters", "steps", "tokens_a_step")
    found = [
        other
        for other in results
        if other["variant"] == "bf16" and all(other[key] == result[key] for key in alike)
    ]
    return found[0] if found else None


def percent(result: Result, reference: Result) -> float:
    """Return by how much the held-out loss is larger."""
    return (heldout(result) / heldout(reference) - 1) * 100


def row(result: Result, results: Sequence[Result]) -> str:
    """A run's line of the table."""
    reference = of_bf16(result, results)
    cells = [result["variant"], str(result["seed"]), f"{heldout(result):.4f}"]
    if reference is None or reference is result:
        cells += ["–", f"{result['tokens_per_second']:,.0f}", "–"]
    else:
        speed = result["tokens_per_second"] / reference["tokens_per_second"]
        cells += [
            f"{percent(result, reference):+.2f}%",
            f"{result['tokens_per_second']:,.0f}",
            f"{speed:.2f}x",
        ]
    peak = result["peak_bytes"]
    cells.append("–" if peak is None else f"{peak / 2**30:.1f}")
    return f"| {' | '.join(cells)} |"


def means(results: Sequence[Result]) -> list[str]:
    """A line for each variant with several seeds: the mean difference of its held-out loss.

    Fused models compute the same bits. A line for bf16 says how far its own seeds differ.
    """
    lines = []
    plain = [heldout(result) for result in results if result["variant"] == "bf16"]
    if len(plain) > 1:
        spread = (max(plain) / min(plain) - 1) * 100
        lines.append(f"- bf16: its {len(plain)} seeds differ by up to {spread:.2f}%")
    numbers = [(r["variant"].replace(", fused", ""), r) for r in results]
    for variant in dict.fromkeys(name for name, _ in numbers):
        runs = [(r, of_bf16(r, results)) for name, r in numbers if name == variant]
        found = [percent(run, other) for run, other in runs if other not in (None, run)]
        if len(found) > 1:
            lines.append(f"- {variant}: {mean(found):+.2f}% over {len(found)} seeds")
    return lines


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG: texts are texts, and equal results make equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})


def draw(results: Sequence[Result], path: Path) -> None:
    """Losses and norms of gradients, and the smoothed differences to bf16."""
    figure = Figure(figsize=(9, 10), layout="constrained")
    losses, differences, norms = figure.subplots(3, 1, sharex=True)
    for result in results:
        label = f"{result['variant']}, seed {result['seed']}"
        steps, points = steps_of(result), SMOOTHED // EVERY
        (line,) = losses.plot(steps, smooth(result["loss"], points), label=label)
        norms.plot(steps, result["norm"], color=line.get_color(), linewidth=0.6)
        reference = of_bf16(result, results)
        if reference is None or reference is result:
            continue
        pairs = zip(result["loss"], reference["loss"], strict=True)
        difference = [(a / b - 1) * 100 for a, b in pairs]
        differences.plot(steps, smooth(difference, points), color=line.get_color())
    losses.set_ylabel(f"training loss, mean of {SMOOTHED} steps")
    losses.legend()
    differences.axhline(0, color="gray", linewidth=0.8)
    differences.set_ylabel(f"loss against bf16, %, mean of {SMOOTHED} steps")
    norms.set_yscale("log")
    norms.set_ylabel(f"norm of the gradient, largest of {EVERY} steps")
    norms.set_xlabel("step")
    save(figure, path)


def page(results: Sequence[Result], folder: Path, title: str = "# Evidence") -> str:
    """Return the page of condensed results, below ``title``; draw its plots into ``folder``."""
    if not results:
        raise ValueError("no results: pass the result.json files of examples/long_run.py")
    facts, level = results[0]["text"], title.partition(" ")[0]
    lines = [
        title,
        "",
        "Whole training runs in bf16 and in FP8: the same initial weights, and the same text in "
        "the same order.",
        *(MOVED if any("moved" in result["variant"] for result in results) else []),
        "",
        f"The text: {facts['train_tokens'] / 1e6:.1f}M of "
        f"{facts['all_train_tokens'] / 1e6:.0f}M tokens of the sources of Linux, each read once "
        f"at most; {facts['heldout_files']} files are held",
        f"out. Every machine can rebuild it, with the sha256 `{facts['sha256']}`:",
        "",
        f"    curl -O {PACKAGE}",
        "    python examples/kernel_text.py linux-source-6.1_*_all.deb runs/kernel_text",
        "",
    ]
    for kind, name, chosen in (
        ("Dense", "dense", [r for r in results if not r["experts"]]),
        ("Experts", "moe", [r for r in results if r["experts"]]),
    ):
        if not chosen:
            continue
        draw(chosen, folder / f"evidence_{name}.svg")
        first = chosen[0]
        lines += [
            f"{level}# {kind}",
            "",
            f"{first['parameters'] / 1e6:.0f}M parameters, {first['steps']:,} steps of "
            f"{first['tokens_a_step']:,} tokens; {first['device']}, torch {first['torch']}. "
            f"Losses are in nats a token.",
            "",
            "| run | seed | held-out loss | against bf16 | tokens/s | against bf16 | peak GiB |",
            "|---|---|---|---|---|---|---|",
            *(row(result, chosen) for result in chosen),
            "",
            *([*means(chosen), ""] if means(chosen) else []),
            f"![Losses, differences and norms](plots/evidence_{name}.svg)",
            "",
            *(f"- {result['date']}: `{result['command']}`" for result in chosen),
            "",
        ]
    return "\n".join(lines)


def ablation(contents: Sequence[Result]) -> str:
    """The section of the page on the files of ``ablation.py``."""
    outcomes = [Outcome(**run) for content in contents for run in content["runs"]]
    devices = dict.fromkeys(content["device"] for content in contents)
    lines = [
        "## What each matmul costs",
        "",
        f"The model of `make demo` on a GPU (114M parameters, 1,000 steps of 16k bytes of source "
        f"code); {', '.join(devices)}.",
        "Held-out loss against bf16 of the same seed, in nats a byte:",
        "",
        table(outcomes),
        "",
        *(f"- {content['date']}: `{content['command']}`" for content in contents),
        "",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(
        prog="long_run_report.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, nargs="+", help="result.json files")
    parser.add_argument("--ablation", type=Path, nargs="+", default=[], help="ablation.json files")
    parser.add_argument("--out", type=Path, required=True, help="the page")
    options = parser.parse_args(argv)
    results = [condensed(json.loads(path.read_text())) for path in options.results]
    text = page(results, options.out.parent / "plots")
    if options.ablation:
        contents = [json.loads(path.read_text()) for path in options.ablation]
        text = "\n".join([text, ablation(contents)])
    options.out.write_text(text)


if __name__ == "__main__":
    main()
