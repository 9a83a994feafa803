"""Host time: what eager mode pays before the GPU has anything to do."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import blocktensor as bt
from blocktensor.ops.cast import ops as casts
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128
from blocktensor.ops.gemm.choose_backend import usable_gemm_backends
from blocktensor.ops.gemm.ops import gemm
from blocktensor.ops.runtime.specialize import GEMM_VARIABLE

from . import experts
from .linear import step
from .timing import Call

SHAPES = ((256, 512, 512), (4096, 2048, 2048))
"""(M tokens, N out, K in)."""

ROUNDS = 10
"""Calls take turns so often, as the speed of a host may halve within seconds."""
CALLS = 50
"""In a row."""
EXPERTS = 8

Timed = tuple[str, str, Call]
"""An op, its backend or dtype, and a call of it."""


def host_us(call: Call, calls: int = CALLS) -> float:
    """Median microseconds until ``call`` returns, the GPU idle at its start."""
    for _ in range(5):
        call()
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return median(times) * 1e6


def in_own_thread(call: Call) -> Call:
    """Return ``call`` with its backward in autograd's own thread, as torch has it by default."""

    def once() -> None:
        with torch.autograd.set_multithreading_enabled(True):
            call()

    return once


def of_other_rows(layer: nn.Module, rows: int, k: int, ends: Tensor | None = None) -> Call:
    """Return a call that takes a step with one row more than the call before it.

    The rows of a rank's experts, and of batches without padding, change like this. ``ends``: for
    experts, the ends of groups of one row each.
    """
    counts = itertools.count(rows)
    x = torch.randn(rows + 2 * ROUNDS * CALLS, k, device="cuda", dtype=torch.bfloat16)
    groups = {} if ends is None else {n: ends * (n // EXPERTS) for n in range(rows, len(x))}

    def call() -> None:
        count = next(counts)
        leaf = x[:count].detach().requires_grad_()
        y = layer(leaf, groups[count]) if groups else layer(leaf)
        y.backward(y.detach())
        layer.zero_grad()

    return call


def _calls(m: int, n: int, k: int) -> Iterator[Timed]:
    """Yield what is timed."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    a, b = casts.quantize_rowwise(x, BLOCKS_1X128), casts.quantize_rowwise(w, BLOCKS_128X128)
    yield "cast rowwise", "fp8", lambda: casts.quantize_rowwise(x, BLOCKS_1X128)
    yield "cast columnwise", "fp8", lambda: casts.quantize_columnwise(x, BLOCKS_1X128)
    yield "cast rowwise+columnwise", "fp8", lambda: casts.quantize_both(x, BLOCKS_1X128)
    yield "cast 128x128", "fp8", lambda: casts.quantize_rowwise(w, BLOCKS_128X128)
    yield "transpose 128x128", "fp8", lambda: casts.transpose(b)
    for name in usable_gemm_backends(x.device):
        if name != "reference":
            yield "gemm", name, lambda: gemm(a, b, None, torch.bfloat16)
    grad = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    leaf = x.detach().requires_grad_()
    for dtype in ("bf16", "fp8"):
        layer = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
        if dtype == "fp8":
            bt.to_blockwise_fp8_weights(layer)
        yield "linear forward", dtype, functools.partial(layer, leaf)
        same = step(layer, leaf, grad)
        yield from _steps("linear", dtype, same, of_other_rows(layer, m, k))
    ends = torch.arange(1, EXPERTS + 1, device="cuda", dtype=torch.int32)
    for name in ("bf16", "fp8", "fp8, fused"):
        moe = experts.variant(name, experts.Shape(EXPERTS, m // EXPERTS, k, n // 2))
        same = experts.step(moe, leaf, x, ends * (m // EXPERTS))
        yield from _steps("experts", name, same, of_other_rows(moe, m, k, ends))


def _steps(what: str, name: str, same: Call, other: Call) -> Iterator[Timed]:
    yield f"{what} forward+backward", name, same
    yield f"{what} forward+backward, autograd's thread", name, in_own_thread(same)
    yield f"{what} forward+backward, other rows", name, other


def measure(
    shapes: tuple[tuple[int, int, int], ...] = SHAPES, rounds: int = ROUNDS
) -> Iterator[dict[str, Any]]:
    """One row an op, backend and shape: host microseconds a call, and over those of bf16.

    Those of a cast or a GEMM are over a forward of the bf16 linear. The backward runs in the
    caller's thread unless the op's name says otherwise.
    """
    before = os.environ.pop(GEMM_VARIABLE, None)
    try:
        for m, n, k in shapes:
            calls = {(op, what): call for op, what, call in _calls(m, n, k)}
            times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
            with torch.autograd.set_multithreading_enabled(False):
                for call in calls.values():
                    host_us(call, 20)  # kernels are compiled and launches recorded
                for (op, what), call in [*calls.items()] * rounds:
                    if op == "gemm":
                        os.environ[GEMM_VARIABLE] = what
                    times[op, what].append(host_us(call))
                    os.environ.pop(GEMM_VARIABLE, None)
            us = {key: median(found) for key, found in times.items()}
            for (op, what), found in us.items():
                row = {"op": op, "in": what, "m": m, "n": n, "k": k, "host_us": round(found, 1)}
                bf16 = us.get((op, "bf16"), us["linear forward", "bf16"])
                yield row if what == "bf16" else {**row, "over_bf16": round(found / bf16, 2)}
    finally:
        if before is not None:
            os.environ[GEMM_VARIABLE] = before
