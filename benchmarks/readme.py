"""The README's results, made from ``benchmarks/results``: ``python -m benchmarks readme``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .results import FOLDER

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- results: python -m benchmarks readme -->", "<!-- end of results -->"


def _load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return content


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]


def _source(name: str) -> str:
    where = _load(name)["environment"]
    return (
        f"`{where['command']}`, {where['device']}, torch {where['torch']}, "
        f"Triton {where['triton']}, {where['date']}"
    )


def _linear() -> list[str]:
    rows = [
        (
            f"{r['m']} x ({r['n']} x {r['k']})",
            f"{r['eager_speedup']:.2f}x",
            f"{r['flushed_speedup']:.2f}x",
            f"{r['graph_speedup']:.2f}x",
        )
        for r in _load("linear")["rows"]
    ]
    header = ("tokens x (out x in)", "eager, sustained", "eager, one call", "CUDA graph")
    return [
        "**nn.Linear, forward + backward, FP8 against bf16**, the weight cast every step:",
        "",
        *_table(header, rows),
        "",
        f"({_source('linear')}. Host time bounds small layers in eager mode: compare the graph.)",
    ]


def _memory() -> list[str]:
    rows = [
        (r["variant"], f"{r['m']} x ({r['n']} x {r['k']})", r["peak_mib"], r["saved_mib"])
        for r in _load("memory")["rows"]
    ]
    return [
        "**Peak memory of that linear in a training step** (MiB, weights and gradients included):",
        "",
        *_table(("variant", "tokens x (out x in)", "peak", "less than bf16"), rows),
        "",
        f"({_source('memory')})",
    ]


def _cast() -> list[str]:
    measured = {
        (r["op"], r["m"], r["k"]): r["share_of_copy"]
        for r in _load("cast")["rows"]
        if r["dtype"] == "bfloat16"
    }
    shapes = sorted({(m, k) for _, m, k in measured}, key=lambda s: -s[0] * s[1])
    ops = list(dict.fromkeys(op for op, _, _ in measured))
    rows = [(op, *(f"{measured[op, m, k]:.0%}" for m, k in shapes)) for op in ops]
    return [
        "**Casts of bf16, share of the speed of a plain copy** (bytes that must move):",
        "",
        *_table(("cast", *(f"{m} x {k}" for m, k in shapes)), rows),
        "",
        f"({_source('cast')})",
    ]


def _training() -> list[str]:
    demo = _load("train_lm")
    by_seed: dict[int, dict[str, Any]] = {}
    for run in demo["runs"]:
        by_seed.setdefault(run["seed"], {})[run["precision"]] = run
    rows = []
    for seed, runs in by_seed.items():
        losses = [runs[p]["heldout_loss"] for p in ("bf16", "fp8")]
        rows.append((seed, *(f"{x:.4f}" for x in losses), f"{losses[1] / losses[0] - 1:+.2%}"))
    size = demo["config"]["parameters"] / 1e6
    return [
        f"**The demo's model, {size:.0f}M parameters, {demo['config']['steps']} steps**, loss on "
        f"held-out text:",
        "",
        *_table(("seed", "bf16", "FP8", "difference"), rows),
        "",
        f"(`python examples/train_lm.py --seeds {len(rows)}`, {demo['device']['name']}, "
        f"{demo['date'][:10]})",
    ]


def render() -> str:
    """The section between the two marks, marks included."""
    parts = [_linear(), _memory(), _cast(), _training()]
    return "\n\n".join([START, *("\n".join(part) for part in parts), END])


def update(readme: Path = README) -> bool:
    """Rewrite the section in place; whether anything changed.

    Raises:
        ValueError: the README lacks one of the marks.
    """
    text = readme.read_text()
    if START not in text or END not in text:
        raise ValueError(f"{readme} needs the marks {START!r} and {END!r}")
    new = text[: text.index(START)] + render() + text[text.index(END) + len(END) :]
    readme.write_text(new)
    return new != text
