"""Peak memory of one linear's forward + backward inside a training step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import blocktensor as bt

SHAPES = ((4096, 18432, 7168), (16384, 18432, 7168))


def _peak(layer: nn.Linear, m: int) -> tuple[int, int]:
    """Bytes allocated at most during a step, and held after it; weights included, input not.

    The input is an activation that only the layer keeps, the gradient comes from the next op:
    as inside a model. Measured on the third step, when caches have seen an optimizer.
    """
    source = torch.randn(m, layer.in_features, device="cuda", dtype=torch.bfloat16)
    source.requires_grad_()
    peak = held = 0
    for _ in range(3):
        layer.weight.grad = source.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        x = source * 0.5
        y = layer(x)
        del x
        loss = (y * 0.5).sum()
        del y
        loss.backward()
        torch.cuda.synchronize()
        peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        with torch.no_grad():
            layer.weight.mul_(0.999)  # an optimizer step
    return peak - source.nbytes, held - source.nbytes


def measure(shapes: tuple[tuple[int, int, int], ...] = SHAPES) -> Iterator[dict[str, Any]]:
    """One row a shape and variant; ``saved`` is against bf16, ``copy_of_x`` is x in bf16."""
    variants = {
        "bf16": None,
        "fp8": bt.Recipe(),
        "fp8, columnwise kept": bt.Recipe(columnwise="keep"),
        "fp8, cache_weight=False": bt.Recipe(cache_weight=False),
    }
    for m, n, k in shapes:
        baseline = 0
        for name, recipe in variants.items():
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            layer = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
            if recipe is not None:
                bt.to_blockwise_fp8_weights(layer, recipe)
            peak, held = (value - before for value in _peak(layer, m))
            baseline = baseline or peak
            yield {
                "variant": name,
                "m": m,
                "n": n,
                "k": k,
                "peak_mib": round(peak / 2**20, 1),
                "held_mib": round(held / 2**20, 1),
                "saved_mib": round((baseline - peak) / 2**20, 1),
                "copy_of_x_mib": round(2 * m * k / 2**20, 1),
            }
            del layer
