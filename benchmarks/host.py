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

CALLS = 500
EXPERTS = 8


def host_us(call: Call, calls: int = CALLS) -> float:
    """Median microseconds until ``call`` returns, the GPU idle at its start."""
    for _ in range(30):
        call()
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return median(times) * 1e6


def in_one_thread(call: Call) -> Call:
    """Return ``call`` with its backward in the caller's thread instead of autograd's own."""

    def once() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            call()

    return once


def of_other_rows(layer: nn.Module, rows: int, k: int, ends: Tensor | None = None) -> Call:
    """Return a call that takes a step with one row more than the call before it.

    The rows of a rank's experts, and of batches without padding, change like this. ``ends``: for
    experts, the ends of groups of one row each.
    """
    counts = itertools.count(rows)
    x = torch.randn(rows + 2 * CALLS, k, device="cuda", dtype=torch.bfloat16)
    groups = {} if ends is None else {n: ends * (n // EXPERTS) for n in range(rows, len(x))}

    def call() -> None:
        count = next(counts)
        leaf = x[:count].detach().requires_grad_()
        y = layer(leaf, groups[count]) if groups else layer(leaf)
        y.backward(y.detach())
        layer.zero_grad()

    return call


def _calls(m: int, n: int, k: int) -> Iterator[tuple[str, str, Call]]:
    """Yield what is timed: an op, its backend or dtype, and a call of it."""
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
        yield "linear forward+backward", dtype, same
        yield "linear forward+backward, one thread", dtype, in_one_thread(same)
        yield "linear forward+backward, other rows", dtype, of_other_rows(layer, m, k)
    ends = torch.arange(1, EXPERTS + 1, device="cuda", dtype=torch.int32)
    for name in ("bf16", "fp8", "fp8, fused"):
        moe = experts.variant(name, experts.Shape(EXPERTS, m // EXPERTS, k, n // 2))
        same = experts.step(moe, leaf, x, ends * (m // EXPERTS))
        yield "experts forward+backward", name, same
        yield "experts forward+backward, one thread", name, in_one_thread(same)
        yield "experts forward+backward, other rows", name, of_other_rows(moe, m, k, ends)


def measure(shapes: tuple[tuple[int, int, int], ...] = SHAPES) -> Iterator[dict[str, Any]]:
    """One row an op, backend and shape: host microseconds a call, median of 500."""
    before = os.environ.pop(GEMM_VARIABLE, None)
    try:
        for m, n, k in shapes:
            for op, what, call in _calls(m, n, k):
                if op == "gemm":
                    os.environ[GEMM_VARIABLE] = what
                us = host_us(call)
                os.environ.pop(GEMM_VARIABLE, None)
                yield {"op": op, "in": what, "m": m, "n": n, "k": k, "host_us": round(us, 1)}
    finally:
        if before is not None:
            os.environ[GEMM_VARIABLE] = before
