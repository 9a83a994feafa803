"""Measure what FP8 costs in loss, for each of the three matmuls of a linear layer.

    python examples/ablation.py --seeds 3

trains the model of ``train_lm.py`` for every variant and seed: in bf16, with FP8 in one matmul
alone, and in FP8 by recipes. OUT/ablation.json has the results; the table is printed as Markdown.
Flags: as ``train_lm.py`` (but --recipe and --wgrad-input), and --variants.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in train_lm.py

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blocktensor
from common.gpt import GPT
from common.options import Options, parse_options
from common.text import Corpus, load_corpus
from common.training import Run, heldout_loss, train
from long_run import move

MATMULS: dict[str, tuple[str, ...]] = {
    "fprop alone": ("fprop",),
    "dgrad alone": ("dgrad",),
    "wgrad alone": ("wgrad",),
}
"""Matmuls in FP8; the others run in bf16."""

RECIPES = {
    "Recipe()": blocktensor.Recipe(),
    "Recipe.deepseek()": blocktensor.Recipe.deepseek(),
    "wgrad_input=high_precision": blocktensor.Recipe(wgrad_input="high_precision"),
    "scale=power_of_two": blocktensor.Recipe(scale="power_of_two"),
}
FP8_HEAD = "Recipe(), and in the head"
MOVED = "none, weights moved by 1e-6"
"""bf16 from other initial weights: how far two runs come apart by rounding alone."""

VARIANTS = ("bf16", MOVED, *MATMULS, *RECIPES, FP8_HEAD)


class _Linear(torch.autograd.Function):
    """``x wᵀ``, whose three matmuls run in FP8 or in bf16, as ``matmuls`` says of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, matmuls: tuple[str, ...]) -> Tensor:
        ctx.matmuls, ctx.dtype = matmuls, torch.get_autocast_dtype(x.device.type)
        ctx.save_for_backward(x, w)
        return _run("fprop" in matmuls, x, w, ctx.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        found = []
        for matmul, wanted in (("dgrad", x), ("wgrad", w)):
            # The forward runs once more: the library's backward belongs to a whole linear.
            leaf = wanted.detach().requires_grad_()
            with torch.enable_grad():
                operands = (leaf, w.detach()) if wanted is x else (x.detach(), leaf)
                y = _run(matmul in ctx.matmuls, *operands, ctx.dtype)
            found += torch.autograd.grad(y, leaf, grads[0])
        return *found, None


def _run(fp8: bool, x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    linear = blocktensor.functional.linear if fp8 else F.linear
    with torch.autocast(x.device.type, dtype):
        return linear(x, w)


class PartlyFP8(nn.Linear):
    """A linear with FP8 in some of its matmuls."""

    matmuls: tuple[str, ...]

    def forward(self, x: Tensor) -> Tensor:
        return _Linear.apply(x, self.weight, self.matmuls)


def prepare(model: GPT, variant: str) -> None:
    """Let the linears of the blocks compute as ``variant`` says."""
    if variant == FP8_HEAD:
        blocktensor.convert(model, convert_head=True, skip_small=False)
    elif variant in RECIPES:
        blocktensor.convert(model, RECIPES[variant], skip_small=False)
    elif variant == MOVED:
        move(model, 1e-6)
    elif variant in MATMULS:
        for module in model.blocks.modules():
            if type(module) is nn.Linear:
                module.__class__ = PartlyFP8
                module.matmuls = MATMULS[variant]  # type: ignore[assignment]


@dataclass
class Outcome:
    """The losses of one run."""

    variant: str
    seed: int
    heldout_loss: float
    train_loss: float
    tokens_per_second: float | None


def perform(variant: str, seed: int, corpus: Corpus, options: Options) -> Outcome:
    """Train and evaluate one model."""
    torch.manual_seed(seed)
    model = GPT(options.model).to(options.device)
    prepare(model, variant)
    run = Run(seed, variant)
    train(model, corpus, options, run, lambda done, loss, speed: None)
    model.eval()
    heldout = heldout_loss(model, corpus, options)
    assert run.train_loss is not None
    return Outcome(variant, seed, heldout, run.train_loss, run.tokens_per_second)


def table(outcomes: Sequence[Outcome]) -> str:
    """Held-out loss of every variant against bf16 of the same seed, in Markdown."""
    losses = {(o.variant, o.seed): o.heldout_loss for o in outcomes}
    seeds = sorted({o.seed for o in outcomes})
    heads = ["FP8 in", *(f"seed {seed}" for seed in seeds), "mean", "standard deviation"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for variant in dict.fromkeys(o.variant for o in outcomes):
        found = [losses.get((variant, seed)) for seed in seeds]
        form = "{:.4f}"
        if variant != "bf16":
            form = "{:+.2f}%"
            bf16 = [losses.get(("bf16", seed)) for seed in seeds]
            found = [a and b and (a / b - 1) * 100 for a, b in zip(found, bf16, strict=True)]
        known = [value for value in found if value is not None]
        cells = ["–" if value is None else form.format(value) for value in found]
        cells.append(form.format(statistics.mean(known)))
        spread = statistics.stdev(known) if len(known) > 1 else None
        cells.append("–" if spread is None else form.replace("+", "").format(spread))
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Make every run, and save after each."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="ablation.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="default: all"
    )
    flags, others = parser.parse_known_args(arguments)
    options = parse_options(others)
    variants = ["bf16", *(name for name in flags.variants if name != "bf16")]
    corpus = load_corpus().to(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for seed in range(options.seed, options.seed + options.seeds):
        for variant in variants:
            outcomes.append(perform(variant, seed, corpus, options))
            print(outcomes[-1], flush=True)
            content = {
                "command": shlex.join(["python", "examples/ablation.py", *arguments]),
                "date": datetime.now(timezone.utc).date().isoformat(),
                "device": torch.cuda.get_device_name() if options.device.type == "cuda" else "cpu",
                "torch": torch.__version__,
                "runs": [vars(outcome) for outcome in outcomes],
            }
            (options.out / "ablation.json").write_text(json.dumps(content, indent=1) + "\n")
    print(table(outcomes))


if __name__ == "__main__":
    main()
