"""nn.Linear forward + backward, bf16 against FP8, eager, the weight cast every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import blocktensor as bt

from .timing import Call, flushed, graphed, round_robin

SHAPES = (
    (4096, 18432, 7168),
    (16384, 18432, 7168),
    (8192, 28672, 8192),
    (4096, 4096, 4096),
    (4096, 10944, 2048),
    (4096, 2048, 7168),
    (4096, 7168, 2048),
    (4096, 2048, 2048),
)
"""(M tokens, N out, K in)."""


def _step(layer: nn.Linear, x: Tensor, grad: Tensor) -> Call:
    def run() -> None:
        if isinstance(layer.weight, bt.BlockwiseFP8Weight):
            layer.weight.invalidate()  # as after an optimizer step: one cast a step
        x.grad = layer.weight.grad = None
        layer(x).backward(grad)

    return run


def measure(shapes: tuple[tuple[int, int, int], ...] = SHAPES) -> Iterator[dict[str, Any]]:
    """One row a shape: eager under sustained load, eager with L2 flushed, and in CUDA graphs."""
    for m, n, k in shapes:
        sets = max(1, min(4, 2**28 // (m * (n + k))))
        data = [
            (
                torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True),
                torch.randn(m, n, device="cuda", dtype=torch.bfloat16),
            )
            for _ in range(sets)
        ]
        layers = {}
        for name in ("bf16", "fp8"):
            layers[name] = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
        bt.to_blockwise_fp8_weights(layers["fp8"])
        steps = {name: [_step(layer, x, g) for x, g in data] for name, layer in layers.items()}
        once = {name: flushed(calls[0]) for name, calls in steps.items()}
        eager = round_robin(steps)
        graphs = {name: [graphed(call) for call in calls] for name, calls in steps.items()}
        device = round_robin(graphs)
        row: dict[str, Any] = {"m": m, "n": n, "k": k}
        for label, times in (("eager", eager), ("flushed", once), ("graph", device)):
            row |= {
                f"{label}_bf16_ms": round(times["bf16"], 4),
                f"{label}_fp8_ms": round(times["fp8"], 4),
                f"{label}_speedup": round(times["bf16"] / times["fp8"], 3),
            }
        backends = sorted({p.backend for p in bt.explain([(m, n, k)]).products})
        yield row | {"backends": " ".join(backends)}
