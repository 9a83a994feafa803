"""Generated parts of the results page about whole blocks and models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .page_parts import Content, source, source_in_brief, table, times
from .results import Row

MODES = ("eager", "compiled")
_PARTS = ("gemms", "attention", "casts", "norms", "swiglu", "rest", "idle")


def speeds(row: Row) -> list[Any]:
    """Cells below :data:`SPEEDS`."""
    cells: list[Any] = []
    for mode in MODES:
        cells += [row[f"{mode}_ms"] or "–", times(row[f"{mode}_speedup"])]
    return cells


_WITHOUT_FORMS = ("1 / rms", "RMS norm backward")
SPEEDS = ("eager, ms", "over bf16", "torch.compile, ms", "over bf16")


def block(content: Content, page: Path) -> list[str]:
    """The Llama-8B-shaped stack."""
    layers, tokens = content["rows"][0]["layers"], content["rows"][0]["tokens"]
    return [
        f"**{layers} Llama-8B-shaped blocks, {tokens} tokens**, forward + backward with attention "
        f"and norms, every weight cast as after an optimizer step:",
        "",
        *table(("", *SPEEDS), [(r["variant"], *speeds(r)) for r in content["rows"]]),
        "",
        source(content, "; torch.compile merges equal casts, so inputs are not shared there"),
    ]


def block_in_brief(content: Content, page: Path) -> list[str]:
    """The stack's speed-ups in a sentence."""
    by_variant = {row["variant"]: row for row in content["rows"]}
    row = by_variant["fp8"]
    eager, compiled = (times(row[f"{mode}_speedup"]) for mode in MODES)
    said = [f"{eager} bf16 in eager mode, {compiled} compiled"]
    ways = {
        "with `fuse`": "fp8, fused",
        "and `Recipe.fast()`, at a [cost in loss](docs/guides/recipes.md),": (
            "fp8, fused, wgrad_input=128x128"
        ),
    }
    for name, variant in ways.items():
        if found := by_variant.get(variant):
            speeds = (times(found[f"{mode}_speedup"]) for mode in MODES)
            said.append(f"{name} {' and '.join(speeds)}")
    return [
        f"{row['layers']} Llama-8B-shaped blocks, forward + backward: {'; '.join(said)} "
        f"{source_in_brief(content)}."
    ]


def layer(content: Content, page: Path) -> list[str]:
    """Where the time of a block goes."""
    columns = [f"{part}_us" for part in (*_PARTS, "step")]
    rows = [
        (r["variant"], r["mode"], *(f"{r[column]:.0f}" for column in columns))
        for r in content["rows"]
    ]
    return [
        "**Where the time of one of these blocks goes**, microseconds of a forward + backward by "
        "kinds of kernels:",
        "",
        *table(("", "mode", *_PARTS, "in all"), rows),
        "",
        source(content, "; kernels of fused modules count as casts"),
    ]


def producers(content: Content, page: Path) -> list[str]:
    """Casts made where values are computed."""
    rows = []
    for r in content["rows"]:
        blocks = "–" if r["op"] in _WITHOUT_FORMS else r["columnwise"]
        ratios = times(r["over_apart"]), f"{r['share_of_copy']:.0%}"
        row = r["op"], f"{r['m']} x {r['k']}", blocks, r["us"], r["apart_us"], *ratios
        if blocks != "–" or r["columnwise"] == "1x128":
            rows.append(row)
    header = ("op", "shape", "columnwise blocks", "µs", "eager ops, then casts, µs", "over them",
              "of a copy's speed")  # fmt: skip
    return [
        "**Fused producers**, in bf16: one kernel computes and casts, rowwise and columnwise. "
        "`1 / rms` and the norm's backward make no FP8 forms: they are fused around torch's own "
        "sums, so that their bits are eager mode's:",
        "",
        *table(header, rows),
        "",
        source(content),
    ]


def hf_llama(content: Content, page: Path) -> list[str]:
    """Training steps of transformers' Llama."""
    rows = [
        (r["variant"], *(cell for mode in MODES for cell in (
            r[f"{mode}_ms"], times(r[f"{mode}_speedup"]),
            f"{r[f'{mode}_peak_mib'] / 1024:.1f}", times(r[f"{mode}_peak_of_bf16"]))))
        for r in content["rows"]
    ]  # fmt: skip
    header = ("", "eager, ms", "over bf16", "peak, GiB", "over bf16", "torch.compile, ms",
              "over bf16", "peak, GiB", "over bf16")  # fmt: skip
    first = content["rows"][0]
    return [
        f"**transformers' Llama**, {first['layers']} layers of 8B's, vocabulary 32,000, "
        f"{first['tokens']} tokens: whole training steps with AdamW:",
        "",
        *table(header, rows),
        "",
        source(content),
    ]


def head(content: Content, page: Path) -> list[str]:
    """A head and its loss."""
    rows = [
        (f"{r['words']:,} x {r['dim']}", r["variant"], r["ms"], times(r["speedup"]),
         f"{r['peak_mib'] / 1024:.2f}", times(r["peak_of_bf16"]))
        for r in content["rows"]
    ]  # fmt: skip
    tokens = content["rows"][0]["tokens"]
    return [
        f"**A head and its loss**, {tokens} tokens, forward + backward, the weight cast every "
        f"time; in chunks: `functional.linear_cross_entropy`; the peak without inputs and weights:",
        "",
        *table(("words x features", "", "ms", "over bf16", "peak, GiB", "over bf16"), rows),
        "",
        source(content),
    ]
