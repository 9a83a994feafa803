"""From which size on FP8 pays: small linears, forward + backward, eager and in CUDA graphs.

The defaults of ``blocktensor.MinSizes`` come from these rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .linear import layers, step
from .shapes import SMALL_LINEAR, Shape
from .timing import Call, graph_repeats, graphed, round_robin

QUICK: dict[str, Any] = {"shapes": SMALL_LINEAR[:1], "rounds": 3}
"""The arguments of a smoke run."""

_SETS = 3
_WARMING_STEPS = 60  # until every address that the allocator gives has been seen


def measure(shapes: tuple[Shape, ...] = SMALL_LINEAR, rounds: int = 10) -> Iterator[dict[str, Any]]:
    """One row a shape: the speed-up of FP8 over bf16, eager under sustained load and in a graph."""
    for m, n, k in shapes:
        steps: dict[str, list[Call]] = {}
        for _ in range(_SETS):
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            grad = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
            for name, layer in layers(n, k, peer=False).items():
                steps.setdefault(name, []).append(step(layer, x, grad))
        for _ in range(_WARMING_STEPS):
            for calls in steps.values():
                for call in calls:
                    call()
        eager = round_robin(steps, rounds, 6.0)
        repeats = graph_repeats(6 * m * n * k * _SETS)
        graphs = {name: [graphed(*calls, repeats=repeats)] for name, calls in steps.items()}
        device = round_robin(graphs, rounds, 4.0)
        yield {
            "m": m,
            "n": n,
            "k": k,
            "eager_fp8_us": round(eager["fp8"] * 1e3, 1),
            "eager_speedup": round(eager["bf16"] / eager["fp8"], 3),
            "graph_fp8_us": round(device["fp8"] * 1e3 / (repeats * _SETS), 1),
            "graph_speedup": round(device["bf16"] / device["fp8"], 3),
        }
