"""The command line of ``train_lm.py``: flags, presets, and clear errors for impossible values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from common.gpt import ModelConfig

DESCRIPTION = """\
Train the same small GPT twice, from the same seed and on the same data: once in bf16, once in
blockwise FP8 with blocktensor. Then compare the losses, the speed and the memory.

The text is the source code of this Python's standard library, byte by byte, with one file in
sixteen held out. Both runs keep fp32 parameters and use torch.autocast(bfloat16); the FP8 run
differs by one line, blocktensor.convert(model).
"""

EPILOG = """\
presets (any of their values can be overridden by its own flag):
{presets}

examples:
  python examples/train_lm.py                          a demo sized for this machine
  python examples/train_lm.py --steps 50               a quick look
  python examples/train_lm.py --recipe power_of_two    scales rounded up to powers of two
  python examples/train_lm.py --wgrad-input 1x128      weight gradients as DeepSeek-V3's, slower
  python examples/train_lm.py --seeds 5                is the difference larger than the noise?
  python examples/train_lm.py --experts 8              a mixture of experts, 2 of 8 a token
  python examples/train_lm.py --preset gpu --dim 2048 --heads 16 --layers 16

Ctrl-C at any moment keeps what was done: OUT/train_lm.json and OUT/train_lm.png (train_moe.json
and train_moe.png with --experts) are written with the curves so far, and the exit status is 130. On
the CPU, FP8 runs through a plain torch reference that shows the numerics, not the speed.
"""


@dataclass(frozen=True)
class Preset:
    """Sizes that suit a kind of machine."""

    dim: int
    layers: int
    heads: int
    seq: int
    batch: int
    steps: int
    lr: float

    def __str__(self) -> str:
        return (
            f"dim {self.dim}, layers {self.layers}, heads {self.heads}, seq {self.seq}, "
            f"batch {self.batch}, steps {self.steps}, lr {self.lr:g}"
        )


PRESETS = {
    # Both runs together take about 120 s on two cores (300 s with 8 experts), FP8 most of it.
    "cpu": Preset(dim=160, layers=2, heads=4, seq=128, batch=8, steps=400, lr=2e-3),
    # About 110M parameters and 16k tokens a step.
    "gpu": Preset(dim=1536, layers=4, heads=12, seq=512, batch=32, steps=1000, lr=3e-4),
}


@dataclass(frozen=True)
class Options:
    """Everything a comparison needs to know, with presets filled in and values checked."""

    model: ModelConfig
    preset: str
    batch: int
    steps: int
    lr: float
    recipe: Literal["fp32", "power_of_two"]
    wgrad_input: Literal["1x128", "128x128", "high_precision"]
    seed: int
    seeds: int
    device: torch.device
    out: Path
    samples: int

    @property
    def name(self) -> str:
        """Return the name of the files that the comparison is written to."""
        return "train_moe" if self.model.experts else "train_lm"

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.model.seq


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {minimum}, got {text!r}"
            )
        return value

    return parse


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    # Written so that nan fails too.
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        # Reading a number back tells a device that works from one that is only a name (or "meta").
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # torch appends a long list of dispatch keys or a stack to some of these.
        reason = str(error).strip().splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used here: {reason}") from None
    return device


def _folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return path


def build_parser() -> argparse.ArgumentParser:
    """The parser; sizes default to None, which means the preset's."""
    parser = argparse.ArgumentParser(
        prog="train_lm.py",
        description=DESCRIPTION,
        epilog=EPILOG.format(presets="\n".join(f"  {k}  {v}" for k, v in PRESETS.items())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--preset",
        choices=("auto", *PRESETS),
        default="auto",
        help="sizes to start from; auto picks gpu on a CUDA device, else cpu (default: auto)",
    )
    add("--dim", type=_at_least(1), metavar="N", help="width of the model")
    add("--layers", type=_at_least(1), metavar="N", help="transformer layers")
    add("--heads", type=_at_least(1), metavar="N", help="attention heads; must divide dim")
    add("--seq", type=_at_least(1), metavar="N", help="context length in bytes")
    add("--batch", type=_at_least(1), metavar="N", help="sequences per step")
    add(
        "--experts",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="experts in the place of every MLP: a mixture of experts (default: 0, none)",
    )
    add(
        "--top-k",
        type=_at_least(1),
        default=2,
        metavar="N",
        help="experts that a token goes to; together they are as wide as the MLP (default: 2)",
    )
    add("--steps", type=_at_least(1), metavar="N", help="optimizer steps of each run")
    add("--lr", type=_positive_float, metavar="X", help="peak learning rate")
    add(
        "--recipe",
        choices=("fp32", "power_of_two"),
        default="fp32",
        help="FP8 block scales: exact fp32, or rounded up to a power of two (default: fp32)",
    )
    add(
        "--wgrad-input",
        choices=("128x128", "1x128", "high_precision"),
        default="128x128",
        help="what weight gradients read of the input: FP8 in these blocks, or bf16 "
        "(default: %(default)s)",
    )
    add(
        "--seed",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="decides initial weights, batches and samples (default: 0)",
    )
    add(
        "--seeds",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="repeat for N seeds from --seed on and summarise the differences (default: 1)",
    )
    add(
        "--device",
        type=_device,
        metavar="D",
        help="torch device such as cpu, cuda or cuda:1 (default: cuda where there is one)",
    )
    add(
        "--out",
        type=_folder,
        default=Path("runs"),
        metavar="DIR",
        help="folder for the JSON and the PNG, replaced each time (default: runs)",
    )
    add(
        "--samples",
        type=_at_least(0),
        default=2,
        metavar="N",
        help="pieces of text to generate from each model at the end (default: 2)",
    )
    return parser


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Parse ``argv``; a bad value ends the program with a message that names the flag."""
    parser = build_parser()
    flags = parser.parse_args(argv)
    device = flags.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = flags.preset
    if name == "auto":
        name = "gpu" if device.type == "cuda" else "cpu"
    preset = PRESETS[name]

    def size(flag: str) -> int:
        given = getattr(flags, flag)
        return getattr(preset, flag) if given is None else given

    try:
        model = ModelConfig(
            dim=size("dim"),
            layers=size("layers"),
            heads=size("heads"),
            seq=size("seq"),
            experts=flags.experts,
            top_k=flags.top_k,
        )
    except ValueError as error:
        parser.error(str(error))
    return Options(
        model=model,
        preset=name,
        batch=size("batch"),
        steps=size("steps"),
        lr=preset.lr if flags.lr is None else flags.lr,
        recipe=flags.recipe,
        wgrad_input=flags.wgrad_input,
        seed=flags.seed,
        seeds=flags.seeds,
        device=device,
        out=flags.out,
        samples=flags.samples,
    )
