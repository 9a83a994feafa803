"""The rows of benchmarks/results that ``blocktensor.plan`` is compared with, each with its run.

``python -m tests.support.measured_runs`` writes the table of docs/guides/plan.md again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import experts, hf_llama, llama, lora, popular
from blocktensor import Recipe
from blocktensor.reports.plan.describe import Description, describe
from blocktensor.reports.plan.memory import Memory, Run, peak
from blocktensor.reports.plan.setup import Setup
from blocktensor.reports.plan.speed import step
from examples.common.llama import SHAPES, Llama

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FOLDERS = {"H200": "", "H100": "h100"}
MIB = 2**20


@dataclass(frozen=True)
class Measured:
    """A row: what was run, how, and what was measured; None if it was not."""

    file: str
    variant: str
    model: Callable[[], nn.Module]
    settings: dict[str, Any]
    fp8: bool
    peak_mib: float | None
    ms: float | None

    def predicted(self) -> tuple[Memory, float]:
        """Return the predicted memory, and milliseconds of a step."""
        setup = Setup(**self.settings)
        run = Run(_described(self.model(), setup.convert_head), setup, self.fp8)
        return peak(run), sum(step(run).values()) / 1e3


@functools.cache
def _described(model: nn.Module, convert_head: bool) -> Description:
    return describe(model, Setup(convert_head=convert_head))


def rows_of(file: str) -> list[dict[str, Any]]:
    """Return the rows of a file of results."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / file).read_text())["rows"]
    return rows


def of_variant(name: str) -> dict[str, Any]:
    """Return the settings that the name of a variant spells."""
    choices = "1x128", "high_precision"
    wgrad: Any = next((x for x in choices if f"wgrad_input={x}" in name), "128x128")
    return {
        "fuse": "fused" in name,
        "recompute": "recompute" in name,
        "share_inputs": "shared" in name,
        "convert_head": "head" in name,
        "recipe": Recipe(
            cache_weight=False if "cache_weight=False" in name else "backward", wgrad_input=wgrad
        ),
    }


@functools.cache
def _stack(layers: int) -> nn.Module:
    return llama.stack(llama.Shape(), layers, "meta")


@functools.cache
def _frozen(layers: int) -> nn.Module:
    return llama.stack(llama.Shape(), layers, "meta").requires_grad_(False)


@functools.cache
def _hf_llama() -> nn.Module:
    return hf_llama.make_model("bf16", hf_llama.Shape(), "meta")


@functools.cache
def _qwen3(shape: experts.Qwen3) -> nn.Module:
    return experts.make_qwen3("bf16", shape, "meta")


@functools.cache
def _llama_8b() -> nn.Module:
    with torch.device("meta"):
        return Llama(SHAPES["8b"])


def _blocks(card: str, folder: str) -> Iterator[Measured]:
    how = {
        "card": card,
        "batch": llama.BATCH,
        "sequence": llama.TIME,
        "master": "bf16",
        "optimizer": "none",
        "clip": False,
    }
    file = str(Path(folder, "block.json"))
    for row in rows_of(file):
        name, layers = row["variant"], row["layers"]
        if "torchao" in name:
            continue
        for mode, compile in (("eager", "none"), ("compiled", "blocks")):
            if row[f"{mode}_ms"] is None:
                continue
            yield Measured(
                file,
                f"{name}, {mode}",
                functools.partial(_stack, layers),
                how | of_variant(name) | {"compile": compile},
                name != "bf16",
                row[f"{mode}_peak_mib"],
                row[f"{mode}_ms"],
            )


def _memory() -> Iterator[Measured]:
    how = {
        "card": "H200",
        "batch": llama.BATCH,
        "sequence": llama.TIME,
        "master": "bf16",
        "optimizer": "none",
    }
    for row in rows_of("memory.json"):
        name = row["policy"]
        for count, key in ((1, "peak_mib"), (2, "two_microbatches_mib")):
            model = _frozen if "frozen" in name else _stack
            compile = "blocks" if row["mode"] == "compiled" else "none"
            times = " twice" if count == 2 else ""
            yield Measured(
                "memory.json",
                f"{name}, {row['mode']}{times}",
                functools.partial(model, row["layers"]),
                how | of_variant(name) | {"compile": compile, "microbatches": count},
                "fp8" in name,
                row[key],
                None,
            )


def _hf_llamas(card: str, folder: str) -> Iterator[Measured]:
    shape = hf_llama.Shape()
    how = {
        "card": card,
        "batch": shape.batch,
        "sequence": shape.time,
        "master": "bf16",
        "clip": False,
    }
    file = str(Path(folder, "hf_llama.json"))
    for row in rows_of(file):
        name = row["variant"]
        if "torchao" in name:
            continue
        for mode, compile in (("eager", "none"), ("compiled", "model")):
            yield Measured(
                file,
                f"{name}, {mode}",
                _hf_llama,
                how | of_variant(name) | {"compile": compile},
                name != "bf16",
                row[f"{mode}_peak_mib"],
                row[f"{mode}_ms"],
            )


def _qwen3s(card: str, folder: str) -> Iterator[Measured]:
    file = str(Path(folder, "experts.json"))
    for row in rows_of(file):
        if not row["what"].startswith("Qwen3"):
            continue
        name = row["variant"]
        shape = next(x for x in experts.MODELS if x.experts == row["experts"])
        how = {
            "card": card,
            "batch": shape.batch,
            "sequence": shape.time,
            "master": "bf16",
            "clip": False,
        }
        more = of_variant(name)
        if card == "H100":
            more["recipe"] = Recipe.deepseek()  # as the file's environment says
        yield Measured(
            file,
            f"{shape.experts} experts, {name}",
            functools.partial(_qwen3, shape),
            how | more,
            name != "bf16",
            row["peak_mib"],
            row["ms"],
        )


def _fsdp2() -> Iterator[Measured]:
    for row in rows_of("fsdp2.json"):
        name, is_run = row["variant"], row["mode"] == "run"
        how = {
            "card": "H200",
            "gpus": row["ranks"],
            "sharding": "fsdp2",
            "sequence": 8192,
            "compile": "blocks",
            "microbatches": row["microbatches"],
            "gather": "bf16" if "gathered in bf16" in name else "fp8",
            "reshard": "gathered once" not in name,
            "loss": "chunks" if "head in fp8" in name else "logits",
        }
        count = row["microbatches"]
        times = f" x {count}" if count > 1 else ""
        yield Measured(
            "fsdp2.json",
            f"{name}, {row['ranks']} GPUs{times}" + ("" if is_run else ", dry run"),
            _llama_8b,
            how | of_variant(name),
            name != "bf16",
            row["peak_mib"],
            row["step_ms"] if is_run else None,
        )


@functools.cache
def _popular_llama() -> nn.Module:
    return popular.make_model("bf16", popular.MODELS[lora.NAME], "meta")


def _loras() -> Iterator[Measured]:
    """With 4,096 tokens and more: below, the host decides."""
    for row in rows_of("lora.json"):
        if row["length"] < 4096:
            continue
        how = {
            "card": "H200",
            "batch": row["sequences"],
            "sequence": row["length"],
            "master": "fp32" if "fp32" in row["adapters"] else "bf16",
            "lora": lora.RANK,
            "clip": False,
            "share_inputs": True,
            "fuse": row["variant"] == "fp8",
        }
        for mode, compile in (("eager", "none"), ("compiled", "model")):
            is_low = mode == "compiled" and row["variant"] == "bf16" and how["master"] == "bf16"
            yield Measured(
                "lora.json",
                f"{row['variant']}, {row['adapters']}, {row['sequences']} x 4,096, {mode}",
                _popular_llama,
                how | {"compile": compile},
                row["variant"] == "fp8",
                None if is_low else row[f"{mode}_peak_mib"],  # Inductor keeps up to 10% more
                row[f"{mode}_ms"],
            )


def measured_runs() -> list[Measured]:
    """Return all rows."""
    runs = [*_fsdp2(), *_memory(), *_loras()]
    for card, folder in FOLDERS.items():
        runs += [*_blocks(card, folder), *_hf_llamas(card, folder), *_qwen3s(card, folder)]
    return runs


# The table of the guide

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "plan.md"
BEGIN, END = "<!-- measured -->\n", "<!-- end of measured -->\n"
SHOWN = {
    "fsdp2.json": None,
    "block.json": ("bf16, eager", "fp8, eager", "fp8, compiled", "fp8, fused, eager"),
    "hf_llama.json": ("bf16, eager", "fp8, eager", "fp8, compiled", "fp8, fused, eager"),
    "experts.json": ("32 experts, bf16", "32 experts, fp8, fused", "64 experts, fp8"),
    "memory.json": ("bf16, frozen, eager", "fp8, frozen, eager"),
    "lora.json": tuple(
        f"{name}, adapters in fp32, 1 x 4,096, {mode}"
        for name in ("bf16", "fp8")
        for mode in ("eager", "compiled")
    ),
}
"""By file the variants that the guide shows; None for all."""


def table() -> str:
    """Return the table of the guide: predicted and measured memory and time."""
    lines = [
        "| run | card | peak, GiB | measured | | step, ms | measured | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in measured_runs():
        shown = SHOWN[Path(run.file).name]
        if shown is not None and run.variant not in shown:
            continue
        memory, ms = run.predicted()
        assert run.peak_mib is not None
        gib = memory.total / 2**30, run.peak_mib / 2**10
        cells = [f"{Path(run.file).stem}: {run.variant}", run.settings["card"]]
        cells += [f"{gib[0]:.1f}", f"{gib[1]:.1f}", f"{100 * (gib[0] / gib[1] - 1):+.1f}%"]
        cells += ["", "", ""]
        if run.ms is not None:
            cells[-3:] = f"{ms:.0f}", f"{run.ms:.0f}", f"{100 * (ms / run.ms - 1):+.1f}%"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the table into the guide."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
