"""``python -m blocktensor plan``: the arguments of :func:`blocktensor.plan` on a command line."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Sequence
from typing import Any, get_args

from ...recipe import Recipe, WgradInput
from .plan import plan
from .report import TrainingPlan
from .setup import CHOICES

_USUAL = {name: x.default for name, x in inspect.signature(plan).parameters.items()}
"""The arguments of :func:`blocktensor.plan`, each with its default."""

_COUNTS = {
    "gpus": "GPUs",
    "batch": "sequences of a microbatch on one GPU",
    "sequence": "tokens of a sequence",
    "microbatches": "forwards and backwards of a step",
    "lora": "rank of adapters on a frozen base",
}
_FLAGS = {
    "lora_experts": "adapters of experts, too (with --lora)",
    "expert_parallel": "each GPU holds some experts; FSDP2 shards the rest (with --lora)",
    "fuse": "with blocktensor.fuse",
    "recompute": "fuse(model, recompute=True)",
    "share_inputs": "with blocktensor.share_inputs",
    "saved_tensors_in_fp8": "blocks run in blocktensor.saved_tensors_in_fp8",
    "convert_head": "the head in FP8, too",
}
_SWITCHES = {
    "--no-reshard": ("reshard", "FSDP2 keeps weights gathered from forward to backward"),
    "--no-clip": ("clip", "without the norm of all gradients"),
    "--convert-small": ("skip_small", "convert(model, skip_small=False)"),
}
_CHOICES = {
    "card": "default: H100",
    "sharding": "fsdp2 by default if there are several GPUs",
    "gather": "what FSDP2 gathers FP8 weights in",
    "optimizer": "default: adamw",
    "master": "dtype of the weights that the optimizer updates",
    "checkpointing": "activations that backward computes again",
    "compile": "what torch.compile compiles",
    "loss": "of all logits at once, or in chunks (with --convert-head)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of the command."""
    parser.add_argument("model", help="a known id, a config class, or a folder with a config.json")
    for name, what in _COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=_USUAL[name], help=what)
    for name, what in _CHOICES.items():
        parser.add_argument(f"--{name}", choices=CHOICES[name], default=_USUAL[name], help=what)
    for name, what in _FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=what)
    for option, (name, what) in _SWITCHES.items():
        parser.add_argument(option, dest=name, action="store_false", help=what)
    parser.add_argument(
        "--wgrad-input",
        choices=get_args(WgradInput),
        default=Recipe.wgrad_input,
        help="blocks of the input that weight gradients read",
    )
    parser.add_argument("--layers", type=int, help="the same as --set num_hidden_layers=N")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change an attribute of the config",
    )


def run(options: argparse.Namespace) -> TrainingPlan:
    """Return the plan of parsed arguments."""
    settings = {name: x for name, x in vars(options).items() if name in _USUAL and name != "model"}
    sizes = _sizes(options.set)
    if options.layers is not None:
        sizes["num_hidden_layers"] = options.layers
    recipe = Recipe(wgrad_input=options.wgrad_input)
    return plan(options.model, sizes=sizes, recipe=recipe, **settings)


def _sizes(assignments: Sequence[str]) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise ValueError(f"--set {assignment!r}: expected NAME=VALUE")
        try:
            sizes[name] = json.loads(text)
        except ValueError:
            sizes[name] = text
    return sizes
