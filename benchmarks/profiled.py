"""Where the time of a step goes, by kinds of kernels: from torch's profiler."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from .timing import Call

KINDS: dict[str, tuple[str, ...]] = {
    "weight_transposes": ("transpose_128x128_kernel",),
    "weight_casts": ("cast_128x128_kernel", "cast_with_transpose_kernel", "block_kernel"),
    "activation_casts": ("cast_columnwise_kernel", "cast_ahead_kernel", "cast_1x128_kernel"),
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


@dataclass(frozen=True)
class Busy:
    """Device time of one call, in microseconds.

    Attributes:
        by_kernel: the sums of kernels and copies, by name.
        wall: the time from the start of the first to the end of the last, by the calls in it.
        idle: the part of ``wall`` in which none ran.
    """

    by_kernel: dict[str, float]
    wall: float
    idle: float


def busy(call: Call, repeats: int = 5, warm_s: float = 0.5) -> Busy:
    """Where the device time of a call goes, after ``warm_s`` seconds of such calls."""
    end = time.perf_counter() + warm_s
    while time.perf_counter() < end:  # clocks fall under load
        call()
        torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    spans = []
    for name, start, stop in device_spans(call, repeats):
        spans.append((start, stop))
        spent[name] += (stop - start) / repeats
    return Busy(dict(spent), *_wall_and_idle(sorted(spans), repeats))


def _wall_and_idle(spans: list[tuple[float, float]], repeats: int) -> tuple[float, float]:
    """Of one call; ``spans`` of all calls, sorted. The last call ends with its last kernel."""
    if not spans:
        return 0.0, 0.0
    begin = last = spans[0][0]
    idle = 0.0
    for start, end in spans:
        idle += max(0.0, start - last)
        last = max(last, end)
    return (last - begin) / repeats, idle / repeats


def overlap(call: Call, words: str, repeats: int = 3) -> tuple[float, float]:
    """Microseconds of the kernels of a call with ``words`` in their names; of those, beside others.

    "Beside": while a kernel of another kind runs. NCCL's kernels begin when they are launched, so
    time that one waits for another rank counts.
    """
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for name, start, end in device_spans(call, repeats):
        if words in name:
            spans[True].append((start, end))
        elif "nccl" not in name:
            spans[False].append((start, end))
    whole = sum(end - start for start, end in spans[True])
    others = sorted(spans[False])
    beside = sum(covered(span, others) for span in spans[True])
    return whole / repeats, beside / repeats


def covered(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """How much of ``span`` lies in at least one of ``others``, which are sorted by their start."""
    last, end = span
    found = 0.0
    for other_start, other_end in others:
        start, stop = max(last, other_start), min(end, other_end)
        if stop > start:
            found += stop - start
            last = stop
    return found


def parts(call: Call, repeats: int = 3) -> dict[str, float]:
    """Microseconds of device time of one call, by kind of kernel; kinds without any are 0."""
    spent = by_kind(_profile(call, repeats).key_averages())
    return {kind: spent.get(kind, 0.0) / repeats for kind in (*KINDS, OTHER)}


def device_spans(call: Call, repeats: int) -> list[tuple[str, float, float]]:
    """Name, start and end in microseconds of all that the device runs in so many calls."""
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in _profile(call, repeats).events()
        if event.device_type == DeviceType.CUDA
    ]


def _profile(call: Call, repeats: int) -> Any:
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    # Without acc_events torch 2.11 warns of cycles that lose events, also where there is only one.
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    return profile
