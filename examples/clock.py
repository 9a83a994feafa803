"""How long training steps take, and a trace of one of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class Clock:
    """How long steps took, by events where the device has them: nothing waits for it."""

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
        """Of every step; waits for the device."""
        if not self.cuda:
            return [end - start for start, end in self.spans]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in self.spans]


@contextmanager
def traced(path: Path | None, device: torch.device) -> Iterator[None]:
    """Have rank 0 write a Chrome trace of what runs inside; without a path nothing is recorded.

    Every rank records, so that all are slowed alike. On a GPU: kernels alone, and their launches.
    """
    if path is None:
        yield
        return
    kinds = torch.profiler.ProfilerActivity
    cuda = device.type == "cuda"
    # Without acc_events torch 2.11 warns of cycles that lose events, also where there is only one.
    with torch.profiler.profile(
        activities=[kinds.CUDA if cuda else kinds.CPU], acc_events=True
    ) as profile:
        yield
        if cuda:
            torch.cuda.synchronize(device)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))
