"""Figures that pages quote by hand are those of benchmarks/results.

The tables of README.md and docs/results/ are generated; these sentences and tables are not. A
statement that differs from its results fails here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import results
from tests.docs.code_blocks import ROOT

Row = dict[str, Any]


def rows(name: str, card: str = "h200", **wanted: object) -> list[Row]:
    """The rows of a result that have these values."""
    content = results.load(name, results.of_card(card))
    assert content is not None, name
    return results.select(content["rows"], wanted)


def row(name: str, card: str = "h200", **wanted: object) -> Row:
    """The only row of a result that has these values."""
    (found,) = rows(name, card, **wanted)
    return found


def host(kind: str, op: str) -> list[Row]:
    """Return the rows of host times of an op, forward and backward, with one number of tokens."""
    found = rows("host", **{"in": kind})
    begin = f"{op} forward+backward"
    return [x for x in found if x["op"].startswith(begin) and "other rows" not in x["op"]]


def x(factor: float, digits: int = 2) -> str:
    return f"{factor:.{digits}f}x"


def span(values: list[float], unit: str = "x", digits: int = 2) -> str:
    """From the least to the largest value, as text."""
    return f"{min(values):.{digits}f}{unit} to {max(values):.{digits}f}{unit}"


def readme() -> Iterator[str]:
    llama = {v: row("hf_llama", variant=v)["eager_peak_of_bf16"] for v in ("fp8", "fp8, fused")}
    yield f"peaks at {x(llama['fp8'])} bf16's (with `fuse` {x(llama['fp8, fused'])})"
    blocks = [
        x(row("memory", policy=policy, mode="eager")["peak_of_bf16"])
        for policy in ("fp8", "fp8, fused", "fp8, fused, cache_weight=False")
    ]
    yield "at {} (with `fuse` {}; with `cache_weight=False` too {})".format(*blocks)
    linear = [each["over_bf16"] for each in host("fp8", "linear")]
    yield f"an FP8 linear layer takes {span(linear)} of bf16's in eager mode"
    lora = [
        row("lora", variant="fp8", adapters=f"adapters in {dtype}", sequences=4)
        for dtype in ("fp32", "bf16")
    ]
    speeds = [x(each["eager_speedup"], 1) for each in lora]
    peaks = [x(each["eager_peak_of_bf16"], 1) for each in lora]
    yield f"{speeds[0]} of bf16's speed and {peaks[0]} of its memory](docs/results/models.md)"
    yield f"or {speeds[1]} and {peaks[1]} if bf16's adapters are in bf16 too"


def faq() -> Iterator[str]:
    for model in ("Llama-3.2-1B", "Qwen3-4B", "Llama-3.1-8B"):
        for tokens in (1024, 4096):
            of = {r["variant"]: r for r in rows("popular", model=model, tokens=tokens)}
            speeds = [
                x(of[variant][f"{mode}_speedup"])
                for mode in ("eager", "graphs")
                for variant in ("fp8", "fp8, fused")
            ]
            name = f"| {model} " if tokens == 1024 else "| "
            yield f"{name}| {tokens:,} | {' | '.join(speeds)} |"
    block, fused = (row("block", variant=v) for v in ("fp8", "fp8, fused"))
    yield (
        f"{x(block['eager_speedup'])} and {x(block['compiled_speedup'])} on an H200, with `fuse` "
        f"{x(fused['eager_speedup'])} and {x(fused['compiled_speedup'])}"
    )
    llama = {r["variant"]: r for r in rows("hf_llama")}
    yield (
        f"peaks at {x(llama['fp8']['eager_peak_of_bf16'])} of bf16's memory. `fuse` brings it to "
        f"{x(llama['fp8, fused']['eager_peak_of_bf16'])}"
    )
    yield f"Compiled steps peak at {x(llama['fp8']['compiled_peak_of_bf16'])}"
    yield (
        f"runs at {x(llama['fp8, fused']['eager_speedup'])} of bf16's speed on an H200 in eager "
        f"mode with `fuse`, at {x(llama['fp8, fused, head too']['eager_speedup'])} with both"
    )
    part = row("shards", model="Llama 8B", variant="fp8")
    yield (
        f"at {x(part['eager_speedup'])} in eager mode (one thread), {x(part['compiled_speedup'])} "
        f"compiled and {x(part['graphs_speedup'])} in CUDA graphs"
    )


def comparison() -> Iterator[str]:
    names = {
        "bf16": "bf16",
        "torchao tensorwise": "torchao tensorwise",
        "torchao rowwise": "torchao rowwise",
        "fp8": "blocktensor",
        "fp8, fused": "blocktensor, `fuse`",
        "fp8, wgrad_input=1x128": "blocktensor, `Recipe.deepseek()`",
        "fp8, fused, wgrad_input=1x128": "blocktensor, `Recipe.deepseek()`, `fuse`",
    }
    for variant, name in names.items():
        of = row("block", variant=variant)
        cells = [
            f"{of[f'{mode}_ms']:.1f} | {x(of[f'{mode}_speedup'])}" for mode in ("eager", "compiled")
        ]
        yield f"| {name} | {' | '.join(cells)} | {of['compiled_peak_mib']:,.0f} |"
    names["fp8, fused, head too"] = "blocktensor, `fuse`, the head too"
    for variant in ("torchao tensorwise", "torchao rowwise", "fp8", "fp8, fused"):
        speeds = [
            x(row("hf_llama", card, variant=variant)[f"{mode}_speedup"])
            for card in results.CARDS
            for mode in ("eager", "compiled")
        ]
        yield f"| {names[variant]} | {' | '.join(speeds)} |"


def recipes() -> Iterator[str]:
    presets = {
        "fp8, fused": "fused",
        "fp8, fused, wgrad_input=1x128": "fused",
        "fp8, wgrad_input=high_precision": "not fused",
    }
    for variant, how in presets.items():
        of = row("block", variant=variant)
        yield f"| {x(of['eager_speedup'])}, {x(of['compiled_speedup'])}, {how}"
    us = {r["variant"]: r["step_us"] for r in rows("layer", mode="eager")}
    speed = {variant: x(us["bf16"] / each) for variant, each in us.items()}
    yield (
        f'runs at {speed["fp8, backward=dequantized"]} of bf16\'s speed with `"dequantized"` and '
        f'at {speed["fp8, backward=high_precision"]} with `"high_precision"`, where `"fp8"` runs '
        f"at {speed['fp8']}"
    )


def lora() -> Iterator[str]:
    for sequences, length in ((4, 4096), (1, 4096), (1, 1024)):
        of = row(
            "lora",
            variant="fp8",
            adapters="adapters in fp32",
            sequences=sequences,
            length=length,
        )
        cells = of["eager_speedup"], of["compiled_speedup"], of["eager_peak_of_bf16"]
        yield f"| {sequences} x {length:,} | {' | '.join(map(x, cells))} |"
    many, few = (
        row("lora", variant="fp8", adapters="adapters in bf16", sequences=1, length=length)
        for length in (4096, 1024)
    )
    yield (
        f"it is {x(many['eager_speedup'])} eager and {x(many['compiled_speedup'])} compiled with "
        f"1 x 4,096 tokens"
    )
    yield f"({x(few['eager_speedup'])} and {x(few['compiled_speedup'])} over bf16 with adapters"


def saved_tensors() -> Iterator[str]:
    names = {
        "bf16": "bf16",
        "fp8": "`convert`",
        "fp8, fused, recompute": "`convert`, `fuse(recompute=True)`",
    }
    keys = "held_of_bf16", "peak_of_bf16", "speedup"
    for variant, name in names.items():
        pair = [
            row("saved", variant=each, mode="eager", tokens=8192)
            for each in (variant, f"{variant}, saved in FP8")
        ]
        yield f"| {name} | {' | '.join(x(of[key]) for of in pair for key in keys)} |"


def moe() -> Iterator[str]:
    ms = {
        kind: [each["host_us"] / 1000 for each in host(kind, "experts")]
        for kind in ("bf16", "fp8", "fp8, fused")
    }
    yield f"needs {span(ms['fp8'], '', 1)} ms for the experts of a layer"
    yield f"and {span(ms['fp8, fused'] + ms['bf16'], '', 1)} ms fused or in bf16"
    layers = [each for each in rows("experts") if each["what"] == "layer"]
    shared = [each for each in layers if each["variant"] == "fp8, inputs shared"]
    fused = [each for each in layers if each["variant"] == "fp8, fused"]
    yield f"{span([each['saved_of_bf16'] for each in shared])} of bf16's bytes with `share_inputs`"
    yield f"They save {span([each['saved_of_bf16'] for each in fused])} of bf16's bytes"
    yield f"and peak at {span([each['peak_of_bf16'] for each in fused])}"


def expert_parallel() -> Iterator[str]:
    fused, gathered = (
        row("expert_parallel", variant=v)["speed_of_bf16"]
        for v in ("fp8, fused", "fp8, fused, gathered")
    )
    yield f"run at {x(fused)} of bf16's speed with other tokens at each step"
    yield f"and at {x(gathered)} where FSDP2 gathers the experts"


def tensor_parallel() -> Iterator[str]:
    speeds = [
        x(row("tensor_parallel", variant=v)["speed_of_bf16"])
        for v in ("fp8", "fp8, wgrad_input=1x128")
    ]
    yield "runs at {} bf16's speed, at {} with `Recipe.deepseek()`".format(*speeds)


PAGES = {
    "README.md": readme,
    "docs/comparison.md": comparison,
    "docs/design/tensor_parallel.md": tensor_parallel,
    "docs/faq.md": faq,
    "docs/guides/expert_parallel.md": expert_parallel,
    "docs/guides/lora.md": lora,
    "docs/guides/moe.md": moe,
    "docs/guides/recipes.md": recipes,
    "docs/guides/saved_tensors.md": saved_tensors,
}
"""The statements of each page, with the figures of today's results."""


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_figures_of_the_results(page: str) -> None:
    text = " ".join((ROOT / page).read_text("utf-8").split())
    statements = list(PAGES[page]())
    assert statements
    assert [statement for statement in statements if statement not in text] == []
