"""A Llama-8B-shaped stack, forward + backward: how fast, bf16 against FP8."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import blocktensor as bt

from .llama import BATCH, LAYERS, TIME, Shape, compared, inputs, stack

QUICK: dict[str, Any] = {"layers": 1, "rounds": 3}
"""The arguments of a smoke run."""

VARIANTS = (
    "bf16",
    "fp8",
    "fp8, inputs shared",
    "fp8, cache_weight=False",
    "fp8, wgrad_input=128x128",
    "fp8, wgrad_input=high_precision",
    "fp8, fused",
    "fp8, fused, cache_weight=step",
    "fp8, fused, recompute",
    "fp8, fused, store_fp8",
    "fp8, fused, wgrad_input=128x128",
)


def variant(name: str, model: nn.Module) -> nn.Module:
    """A copy of ``model`` as the variant has it."""
    made = copy.deepcopy(model)
    if name == "bf16":
        return made
    chosen: tuple[bt.recipe.WgradInput, ...] = "128x128", "high_precision"
    policies: tuple[bt.recipe.CachePolicy, ...] = False, "step"
    recipe = bt.Recipe(
        cache_weight=next((x for x in policies if f"cache_weight={x}" in name), "backward"),
        wgrad_input=next((x for x in chosen if x in name), "1x128"),
    )
    bt.convert(made, recipe)
    if "shared" in name:
        bt.share_inputs(made)
    if "fused" in name:
        bt.fuse(made, recompute="recompute" in name, store_fp8="store_fp8" in name)
    return made


def measure(layers: int = LAYERS, rounds: int = 12) -> Iterator[dict[str, Any]]:
    """One row a variant: milliseconds eager and compiled, and the speed-ups over bf16."""
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 2 * len(VARIANTS)  # all compile the same code
    base = stack(Shape(), layers, "cuda")
    x, grad = inputs()
    models = {name: variant(name, base) for name in VARIANTS}
    for row in compared(models, x, grad, rounds, fullgraph=True):
        yield {**row, "layers": layers, "tokens": BATCH * TIME}
