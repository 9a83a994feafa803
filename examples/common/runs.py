"""Measure a run and record it: clock, trace, versions, whole files."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class Clock:
    """Time steps, by events where the device has them, so that nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.spans: list[tuple[Any, Any]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        start = self._now()
        yield
        self.spans.append((start, self._now()))

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> list[float]:
        """Return the seconds of every step; waits for the device."""
        if not self.cuda:
            return [end - start for start, end in self.spans]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in self.spans]


class Trace:
    """A Chrome trace of the last two steps, which rank 0 writes; without a path, nothing.

    Two, because the first begins with an idle device, and at another time on every rank. All ranks
    record, so that all are slowed equally. On a GPU: kernels alone, and their launches.
    """

    STEPS = 2

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self.path, self.device = path, device
        self.profile: Any = None

    def before(self, step: int, steps: int) -> None:
        """Begin to record if no more than the last two of so many ``steps`` are left."""
        if self.path is None or self.profile is not None or step < steps - self.STEPS:
            return
        kinds = torch.profiler.ProfilerActivity
        kind = kinds.CUDA if self.device.type == "cuda" else kinds.CPU
        # Without acc_events torch 2.11 warns of cycles that lose events, also where there is one.
        self.profile = torch.profiler.profile(activities=[kind], acc_events=True)
        self.profile.start()

    def write(self) -> None:
        """End, and write the file."""
        if self.profile is None or self.path is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.profile.stop()
        if dist.get_rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.profile.export_chrome_trace(str(self.path))


def versions() -> dict[str, str | None]:
    """Versions of what the result may depend on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "blocktensor", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["cuda"] = torch.version.cuda
    return found


def without_nan(value: Any) -> Any:
    """``value`` with every nan and infinity as None, since JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return value


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that becomes ``path`` in one step, or vanishes if the block fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
