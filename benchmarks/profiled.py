"""Where the time of a step goes, by kinds of kernels: from torch's profiler or a Chrome trace."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from .timing import Call

KINDS: dict[str, tuple[str, ...]] = {
    "weight_transposes": ("transpose_128x128_kernel",),
    "weight_casts": ("cast_128x128_kernel", "block_kernel"),
    "activation_casts": ("columnwise_kernel", "cast_1x128_kernel", "words_kernel"),
    "gemms": ("gemm", "grouped", "cutlass", "nvjet", "wgrad_kernel", "sum_kernel", "thin_"),
    "copies": ("memcpy", "memset"),
}
"""Parts of the names of kernels, by what they do: ours, then those of bf16. The first that fits."""

OTHER = "elementwise"

PARTS: dict[str, tuple[str, ...]] = {
    "attention": ("flash", "fmha", "sdpa", "attention", "cudnn_generated"),
    "norms": (
        "rms_norm",
        "norm_kernel",
        "norm_gradients_kernel",
        "rmsnorm",
        "layer_norm",
        "rsqrt",
    ),
    "swiglu": ("silu", "sigmoid"),
}
"""Parts of the names of kernels that are neither GEMMs nor casts; the first that fits."""

REST = "rest"
CASTS = ("activation_casts", "weight_casts", "weight_transposes")

STEP_PARTS: dict[str, tuple[str, ...]] = {
    "collectives": ("nccl",),
    "shards": ("split_with_sizes", "chunk_cat", "copyfunctor"),
    "optimizer": ("fusedadam", "fused_adam", "lpnorm", "multi_tensor_apply"),
    "loss": ("softmax", "cross_entropy", "losses_kernel", "nll_loss"),
}
"""Parts of the names of kernels that a single layer does not run; the first that fits.

``optimizer`` includes the norm of all gradients, ``shards`` FSDP's copies before and after
collectives.
"""

SHOWN = (
    "gemms",
    "attention",
    "casts",
    "norms",
    "swiglu",
    "loss",
    "optimizer",
    "shards",
    "rest",
    "collectives",
    "exposed",
    "idle",
)
"""The parts of a step, in the order of tables."""

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel of this name: one of :data:`KINDS`, or :data:`OTHER`."""
    name = kernel.lower()
    if name.startswith("void at::native"):  # sums and copies, whatever their template arguments
        return OTHER
    return _first(KINDS, name) or OTHER


def _first(table: Mapping[str, tuple[str, ...]], name: str) -> str | None:
    """Return the first key of which a word is part of the name."""
    return next((key for key, words in table.items() if any(word in name for word in words)), None)


def part_of(kernel: str) -> str:
    """Return the part of a layer for a kernel: of :data:`KINDS`, of :data:`PARTS`, or rest."""
    if part := _first(PARTS, kernel.lower()):
        return part
    kind = kind_of(kernel)
    return REST if kind in (OTHER, "copies") else kind


def by_part(spent: Mapping[str, float]) -> dict[str, float]:
    """Microseconds by part, from microseconds by kernel."""
    made: dict[str, float] = defaultdict(float)
    for kernel, us in spent.items():
        made[part_of(kernel)] += us
    return dict(made)


def attention_kernel(spent: Mapping[str, float]) -> str:
    """The name of the attention kernel that takes longest, without its template arguments."""
    found = {kernel: us for kernel, us in spent.items() if part_of(kernel) == "attention"}
    if not found:
        return "none"
    name = max(found, key=lambda kernel: found[kernel])
    return name.removeprefix("void ").partition("<")[0].partition("(")[0]


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
    """Return both for one call, from the sorted spans of all calls."""
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
    """Return the part of ``span`` that ``others``, sorted by their start, cover."""
    last, end = span
    found = 0.0
    for other_start, other_end in others:
        start, stop = max(last, other_start), min(end, other_end)
        if stop > start:
            found += stop - start
            last = stop
    return found


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy of a trace; times in microseconds."""

    name: str
    start: float
    end: float


def part_in_step(kernel: str) -> str:
    """The part of :data:`SHOWN` that a kernel of this name belongs to."""
    if found := _first(STEP_PARTS, kernel.lower()):
        return found
    part = part_of(kernel)
    return "casts" if part in CASTS else part


def kernels(path: Path) -> list[Kernel]:
    """The kernels and copies of a Chrome trace, by their start."""
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    found = [
        Kernel(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in _DEVICE
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def parts_of_call(call: Call, repeats: int = 3) -> dict[str, float]:
    """:func:`parts_of` one of several calls in a row."""
    found = [Kernel(*span) for span in device_spans(call, repeats)]
    parts = parts_of(sorted(found, key=lambda kernel: kernel.start))
    return {part: ms / repeats for part, ms in parts.items()}


def last_step(found: list[Kernel]) -> list[Kernel]:
    """The kernels after AdamW's of the last step but one; all where AdamW ends one step only."""
    end = update = None
    for kernel in found:
        if "fusedadam" in kernel.name.lower():
            update = kernel.end
        elif update is not None and part_in_step(kernel.name) == "gemms":
            end = update  # of a step after which another one computes
    return found if end is None else [kernel for kernel in found if kernel.start >= end]


def parts_of(found: list[Kernel]) -> dict[str, float]:
    """Milliseconds of a step by part; ``found`` by their start.

    Kernels that run beside each other both count. ``exposed`` is the time in which collectives
    alone run, ``idle`` that in which nothing does, from the first kernel to the last.
    """
    spent: dict[str, float] = defaultdict(float)
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for kernel in found:
        part = part_in_step(kernel.name)
        spent[part] += kernel.end - kernel.start
        spans[part == "collectives"].append((kernel.start, kernel.end))
    if found:
        whole = found[0].start, max(kernel.end for kernel in found)
        computing = covered(whole, spans[False])
        busy = covered(whole, sorted(spans[True] + spans[False]))
        spent["exposed"] = busy - computing
        spent["idle"] = whole[1] - whole[0] - busy
    return {part: spent.get(part, 0.0) / 1e3 for part in SHOWN}


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
