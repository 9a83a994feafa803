"""Where the time of a step goes, by kinds of kernels: from torch's profiler."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from .timing import Call

KINDS: dict[str, tuple[str, ...]] = {
    "weight_transposes": ("transpose_128x128_kernel",),
    "weight_casts": ("cast_128x128_kernel", "block_kernel"),
    "activation_casts": ("cast_columnwise_kernel", "cast_1x128_kernel"),
    "gemms": ("gemm", "grouped", "cutlass", "nvjet", "wgrad_kernel", "sum_kernel"),
    "copies": ("memcpy", "memset"),
}
"""Parts of the names of kernels, by what they do: ours, then those of bf16. The first that fits."""

OTHER = "elementwise"


def kind_of(kernel: str) -> str:
    """What a kernel of this name does: one of :data:`KINDS`, or :data:`OTHER`."""
    name = kernel.lower()
    if name.startswith("void at::native"):  # sums and copies, whatever their template arguments
        return OTHER
    found = (kind for kind, parts in KINDS.items() if any(part in name for part in parts))
    return next(found, OTHER)


def by_kind(events: Any) -> dict[str, float]:
    """Microseconds of device time of a profile's events, by kind of kernel."""
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        if event.self_device_time_total > 0:
            spent[kind_of(event.key)] += event.self_device_time_total
    return dict(spent)


def by_kernel(call: Call, repeats: int = 3) -> dict[str, float]:
    """Microseconds of device time of one call, by the names of kernels."""
    spent: dict[str, float] = defaultdict(float)
    for event in _events(call, repeats):
        if event.self_device_time_total > 0:
            spent[event.key] += event.self_device_time_total / repeats
    return dict(spent)


def parts(call: Call, repeats: int = 3) -> dict[str, float]:
    """Microseconds of device time of one call, by kind of kernel; kinds without any are 0."""
    spent = by_kind(_events(call, repeats))
    return {kind: spent.get(kind, 0.0) / repeats for kind in (*KINDS, OTHER)}


def _events(call: Call, repeats: int) -> Any:
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    # Without acc_events torch 2.11 warns of cycles that lose events, also where there is only one.
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    return profile.key_averages()
