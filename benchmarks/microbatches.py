"""Compare a cast of the weights in every forward with one cast for all microbatches of a step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import blocktensor as bt

from .llama import BATCH, LAYERS, TIME, Shape, inputs, stack, step
from .timing import Call, round_robin

QUICK: dict[str, Any] = {"layers": 1, "rounds": 3, "microbatches": 2}
"""The arguments of a smoke run."""

POLICIES: tuple[bt.recipe.CachePolicy, ...] = ("backward", "step", False)


def variant(policy: bt.recipe.CachePolicy, model: nn.Module) -> nn.Module:
    """A converted copy of ``model``."""
    made = copy.deepcopy(model)
    bt.convert(made, bt.Recipe(cache_weight=policy))
    return made


def measure(
    layers: int = LAYERS, rounds: int = 8, microbatches: int = 8
) -> Iterator[dict[str, Any]]:
    """One row a policy: milliseconds of a step in eager mode, and its ratio to ``"step"``."""
    torch.manual_seed(0)
    base = stack(Shape(), layers, "cuda")
    x, grad = inputs()
    calls: dict[str, Call] = {}
    for policy in POLICIES:
        model = variant(policy, base)
        calls[str(policy)] = step(model, model, x, grad, microbatches)
    ms = round_robin({name: [call] for name, call in calls.items()}, rounds, 300.0)
    for name in calls:
        yield {
            "cache_weight": name,
            "layers": layers,
            "microbatches": microbatches,
            "tokens": BATCH * TIME,
            "step_ms": round(ms[name], 3),
            "over_step": round(ms[name] / ms["step"], 4),
        }
