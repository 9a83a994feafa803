"""Where the time of one Llama-8B layer goes, bf16 beside FP8, and the least that it could take.

Parts are sums of kernels of profiled steps, wall and idle time those of the same steps. In eager
mode, products of SwiGLU are among the rest; a fused SwiGLU is among the casts that it is part of.
The step is timed without a profiler too. Limits: dense peaks of the tensor cores, of HBM for casts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from . import profiled, results
from .block import variant
from .llama import Shape, stack, step
from .roofline import BANDWIDTH, FLOPS
from .timing import Call, round_robin

TIME = 8192
"""Tokens of the one sequence."""

QUICK: dict[str, Any] = {"shape": Shape(dim=1024, hidden=2048, heads=8, kv_heads=2), "rounds": 3}
"""The arguments of a smoke run."""

VARIANTS = (
    "bf16",
    "fp8",
    "fp8, fused",
    "fp8, wgrad_input=1x128",
    "fp8, fused, wgrad_input=1x128",
    "fp8, backward=dequantized",
    "fp8, backward=high_precision",
)


def limits(shape: Shape, tokens: int, fp8: bool, card: str) -> dict[str, float]:
    """The least microseconds of forward and backward: GEMMs, causal attention, casts.

    Casts: each input and output gradient of a linear read in bf16 and written twice, each weight
    read and written twice.
    """
    kv = shape.kv_heads * shape.head_dim
    d, h = shape.dim, shape.hidden
    linears = ((d, d), (kv, d), (kv, d), (d, d), (h, d), (h, d), (d, h))  # N, K
    flops = sum(6 * tokens * n * k for n, k in linears)
    attention = 3.5 * 2 * tokens * tokens * d  # the forward's two products, backward's five, halved
    cast = sum(4 * tokens * (n + k) + 4 * n * k for n, k in linears)
    return {
        "gemms": flops / FLOPS["fp8" if fp8 else "bf16"] * 1e6,
        "attention": attention / FLOPS["bf16"] * 1e6,
        "casts": cast / BANDWIDTH[card] * 1e6 if fp8 else 0.0,
    }


def row_of(
    name: str, mode: str, ms: float, busy: profiled.Busy, least: Mapping[str, float]
) -> dict[str, Any]:
    """One row: microseconds of the step by part, beside their limits."""
    parts = profiled.by_part(busy.by_kernel)
    casts = sum(parts.get(kind, 0.0) for kind in profiled.CASTS)
    shown = {
        "gemms": parts.get("gemms", 0.0),
        "attention": parts.get("attention", 0.0),
        "casts": casts,
        **{part: parts.get(part, 0.0) for part in ("norms", "swiglu", profiled.REST)},
    }
    return {
        "variant": name,
        "mode": mode,
        "step_us": round(ms * 1e3, 1),
        "wall_us": round(busy.wall, 1),
        **{f"{part}_us": round(us, 1) for part, us in shown.items()},
        "idle_us": round(busy.idle, 1),
        **{f"{part}_limit_us": round(us, 1) for part, us in least.items()},
        "attention_kernel": profiled.attention_kernel(busy.by_kernel),
    }


def measure(shape: Shape | None = None, rounds: int = 20) -> Iterator[dict[str, Any]]:
    """One row a variant, eager and compiled, all in one round robin."""
    shape = shape or Shape()
    torch.manual_seed(0)
    base = stack(shape, 1, "cuda")
    x = torch.randn(1, TIME, shape.dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn_like(x)
    calls: dict[tuple[str, str], Call] = {}
    for name in VARIANTS:
        model = variant(name, copy.deepcopy(base))
        runs: dict[str, nn.Module] = {
            "eager": model,
            "compiled": torch.compile(model, fullgraph=True),  # type: ignore[dict-item]
        }
        for mode, run in runs.items():
            calls[name, mode] = step(model, run, x, grad)
    for call in calls.values():
        call()
    ms = round_robin({f"{a}/{b}": [call] for (a, b), call in calls.items()}, rounds)
    for (name, mode), call in calls.items():
        busy = profiled.busy(call)
        least = limits(shape, TIME, name != "bf16", results.card())
        yield row_of(name, mode, ms[f"{name}/{mode}"], busy, least)
