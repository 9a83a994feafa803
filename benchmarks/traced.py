"""Where the time of a step on several GPUs goes: kernels of a Chrome trace, or of a profile."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from .layer import CASTS, part_of
from .profiled import covered, device_spans
from .timing import Call

PARTS: dict[str, tuple[str, ...]] = {
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
    *("gemms", "attention", "casts", "norms", "swiglu", "loss", "optimizer", "shards", "rest"),
    *("collectives", "exposed", "idle"),
)
"""The parts of a step, in the order of tables."""

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy of a trace; times in microseconds."""

    name: str
    start: float
    end: float


def part_in_step(kernel: str) -> str:
    """The part of :data:`SHOWN` that a kernel of this name belongs to."""
    name = kernel.lower()
    for part, words in PARTS.items():
        if any(word in name for word in words):
            return part
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
