"""The command line of ``fsdp2_llama.py``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from common.llama import SHAPES, Shape
from common.runs import Trace

DESCRIPTION = """\
Train a Llama-shaped decoder under FSDP2 (fully_shard), in bf16 or in blockwise FP8, where sharded
weights are gathered as 1 byte an element. Started by torchrun, or as one process.

The FP8 run differs by one line, blocktensor.convert(model) before fully_shard. Norms, embedding and
head (without --head fp8) stay in high precision. With a vocabulary of 256 the text is the source
code of this Python's standard library, byte by byte; with any other, tokens are random, small ones
more often.
"""

EPILOG = """\
examples:
  python examples/fsdp2_llama.py                                    one process, a tiny model
  torchrun --nproc-per-node 2 examples/fsdp2_llama.py --precision fp8
  torchrun --nproc-per-node 8 examples/fsdp2_llama.py --model 8b --precision fp8 --compile --ac
  torchrun --nproc-per-node 8 examples/fsdp2_llama.py --model 8b --precision fp8 --gather bf16
  python examples/fsdp2_llama.py --model 8b --precision fp8 --compile --fake-ranks 64   does it fit?
  torchrun --nproc-per-node 2 examples/fsdp2_llama.py --checkpoint runs/ck --checkpoint-every 20

Started again with the same --checkpoint, a run that was killed goes on from its newest complete
checkpoint, bit for bit as if it had not been.
"""

_LARGE = {"seq": 8192, "batch": 1, "lr": 3e-4, "ramp_steps": 200}
DEFAULTS: dict[str, dict[str, Any]] = {
    "tiny": {"seq": 128, "batch": 4, "lr": 1e-3, "ramp_steps": 10},
    "1b": _LARGE,
    "8b": _LARGE,
}
"""Flags that depend on the model, except for its shape."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fsdp2_llama.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, toggle = parser.add_argument, argparse.BooleanOptionalAction
    add("--model", choices=tuple(SHAPES), default="tiny", help="sizes: Llama 3's 1B and 8B")
    add("--layers", type=int, help="blocks, if not the model's")
    add("--vocab", type=int, help="256: bytes of text; any other: random tokens")
    add("--precision", choices=("bf16", "fp8"), default="bf16", help="of linears (default: bf16)")
    add(
        "--gather",
        choices=("fp8", "bf16"),
        help="what FSDP gathers of FP8 weights; bf16: linears cast what came at every use "
        "(default: fp8 with --precision fp8)",
    )
    add("--fuse", action="store_true", help="cast where values are computed (blocktensor.fuse)")
    add(
        "--head",
        choices=("bf16", "fp8"),
        default="bf16",
        help="fp8: the head too, its loss in chunks of --loss-chunk tokens (default: bf16)",
    )
    add(
        "--wgrad-input",
        choices=("128x128", "1x128"),
        default="128x128",
        help="blocks of inputs that FP8 weight gradients read (default: %(default)s)",
    )
    # not --master: torchrun takes that for the beginning of its own --master-addr, and stops
    add(
        "--master-dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="dtype of the sharded weights and of AdamW's state (default: fp32)",
    )
    add("--compile", action="store_true", help="torch.compile every block")
    add("--ac", action="store_true", help="recompute every block in backward")
    add("--reshard-after-forward", action=toggle, default=True, help="gather again for backward")
    add("--seq", type=int, help="tokens of a sequence")
    add("--batch", type=int, help="sequences of each rank in a step")
    add(
        "--accumulate", type=int, default=1, metavar="N", help="microbatches in a step (default: 1)"
    )
    add("--loss-chunk", type=int, default=0, help="tokens whose logits are held at once (0: all)")
    add("--steps", type=int, default=50, help="optimizer steps (default: 50)")
    add("--warmup-steps", type=int, default=5, help="first steps, not timed (default: 5)")
    add("--lr", type=float, help="learning rate: grows, then stays")
    # not of all --steps: a run may be prolonged
    add("--ramp-steps", type=int, metavar="N", help="steps until the learning rate is whole")
    add("--seed", type=int, default=0, help="decides weights and data (default: 0)")
    add("--checkpoint", type=Path, metavar="DIR", help="write checkpoints, resume from the newest")
    add("--checkpoint-every", type=int, metavar="N", help="steps (default: only at the end)")
    add(
        "--fake-ranks",
        type=int,
        metavar="N",
        help="one process as rank 0 of N, nothing sent: memory as on N, time without communication",
    )
    add("--trace", type=Path, metavar="FILE", help="Chrome trace of the last two steps, not timed")
    add("--peak-tflops", type=float, default=989.0, help="MFU's 100%% (default: bf16 of an H100)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--out", type=Path, default=Path("runs/fsdp2_llama"), help="folder of result.json, PNG")
    return parser


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Shape]:
    """Flags with the model's defaults filled in; what cannot be is explained."""
    parser = build_parser()
    options = parser.parse_args(argv)
    shape = SHAPES[options.model]
    defaults = {"layers": shape.layers, "vocab": shape.vocab, **DEFAULTS[options.model]}
    for flag, default in defaults.items():
        if getattr(options, flag) is None:
            setattr(options, flag, default)
    _check_numbers(parser, options)
    _check_combinations(parser, options)
    _check_folders(parser, options)
    if options.precision == "fp8":
        options.gather = options.gather or "fp8"
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return options, replace(shape, layers=options.layers, vocab=options.vocab)


def _check_numbers(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check each number, and that steps are left to time."""
    least = {
        "layers": 1,
        "vocab": 2,
        "seq": 1,
        "batch": 1,
        "accumulate": 1,
        "steps": 1,
        "ramp_steps": 1,
        "warmup_steps": 0,
        "loss_chunk": 0,
        "seed": 0,
        "checkpoint_every": 1,
        "fake_ranks": 1,
    }
    for flag, minimum in least.items():
        value = getattr(options, flag)
        if value is not None and value < minimum:
            parser.error(f"--{flag.replace('_', '-')} must be at least {minimum}, got {value}")
    for flag in ("lr", "peak_tflops"):
        value = getattr(options, flag)
        if not 0 < value < float("inf"):  # nan fails too
            parser.error(f"--{flag.replace('_', '-')} must be a positive number, got {value}")
    timed = options.steps - (Trace.STEPS if options.trace else 0)
    if options.warmup_steps >= timed:
        traced = f", less the {Trace.STEPS} of --trace" if options.trace else ""
        parser.error(
            f"--warmup-steps {options.warmup_steps} leaves no step to time: it must be less than "
            f"--steps {options.steps}{traced}"
        )


def _check_combinations(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check flags that need or exclude each other."""
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    if options.gather and options.precision != "fp8":
        parser.error("--gather is about FP8 weights: give --precision fp8 as well")
    if options.fuse and (options.precision != "fp8" or options.gather == "bf16"):
        parser.error("--fuse is about FP8 weights: give --precision fp8, and not --gather bf16")
    if options.head == "fp8" and (options.precision != "fp8" or options.gather == "bf16"):
        parser.error("--head fp8 needs --precision fp8, without --gather bf16")
    if options.head == "fp8" and options.loss_chunk % 128:
        parser.error(
            f"--head fp8: --loss-chunk must be a multiple of 128, got {options.loss_chunk}"
        )
    if options.fake_ranks and options.checkpoint:
        parser.error("--fake-ranks has one rank's rows only: nothing to --checkpoint")
    if options.fake_ranks and "RANK" in os.environ:
        parser.error("--fake-ranks is for one process: start it with python, not torchrun")
    if options.checkpoint_every and not options.checkpoint:
        parser.error("--checkpoint-every needs a folder: give --checkpoint DIR as well")


def _check_folders(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check that folders are folders, or can be made."""
    if options.trace and options.trace.is_dir():
        parser.error(f"--trace {options.trace} is a folder: give the name of a file")
    parent = options.trace and options.trace.parent
    folders = {"out": options.out, "checkpoint": options.checkpoint, "trace": parent}
    for flag, folder in folders.items():
        if folder is not None and folder.exists() and not folder.is_dir():
            parser.error(f"--{flag} {folder} is not a folder")
