"""A Llama-8B-shaped stack, forward + backward: how fast, bf16 against FP8."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import blocktensor as bt

from . import peers
from .llama import BATCH, LAYERS, TIME, Shape, inputs, modes_of, recipe_of, stack
from .timing import Call, by_mode, peaks_by_mode
from .turns import in_groups, measured_in_turns

QUICK: dict[str, Any] = {"layers": 1, "rounds": 3}
"""The arguments of a smoke run."""

VARIANTS = (
    "bf16",
    "fp8",
    "fp8, inputs shared",
    "fp8, cache_weight=False",
    "fp8, wgrad_input=1x128",
    "fp8, wgrad_input=high_precision",
    "fp8, fused",
    "fp8, fused, recompute",
    "fp8, fused, wgrad_input=1x128",
)

_AT_ONCE = 5
"""Variants beside bf16 that fit into 80 GB."""


def facts() -> dict[str, Any]:
    """Return which peers are absent."""
    return {"absent": peers.without_torchao()}


def variant(name: str, made: nn.Module) -> nn.Module:
    """Make ``made`` what the variant is."""
    if name == "bf16":
        return made
    if name in peers.TORCHAO_TRAINS:
        return peers.torchao_training(name, made)
    bt.convert(made, recipe_of(name))
    if "shared" in name:
        bt.share_inputs(made)
    if "fused" in name:
        bt.fuse(made, recompute="recompute" in name)
    return made


def calls(name: str, layers: int) -> dict[str, Call]:
    """Return the steps of a variant, eager and compiled."""
    torch.manual_seed(0)
    model = variant(name, stack(Shape(), layers, "cuda"))
    return modes_of(name, model, *inputs(), fullgraph=name not in peers.TORCHAO_TRAINS)


def measure(layers: int = LAYERS, rounds: int = 12) -> Iterator[dict[str, Any]]:
    """One row a variant: milliseconds eager and compiled, speed-ups over bf16, and peaks."""
    names = [*VARIANTS, *(() if peers.without_torchao() else peers.TORCHAO_TRAINS)]
    for some, new in in_groups(names, _AT_ONCE):
        ms, peaks = measured_in_turns(some, functools.partial(calls, layers=layers), rounds)
        for name in new:
            row = {"variant": name, **by_mode(ms, name), **peaks_by_mode(peaks, name)}
            yield row | {"layers": layers, "tokens": BATCH * TIME}
