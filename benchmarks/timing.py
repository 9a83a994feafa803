"""Timing on a GPU whose clock follows its temperature: only ratios inside one run are compared."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, Protocol, TypeVar

import torch

Call = Callable[[], object]
Maker = Callable[[Any], Call]
"""Given a set of inputs, return the call that multiplies, or casts, them."""

MODES = ("eager", "compiled", "graphs")

_FLUSHED_BYTES = 2**28  # five times the L2 of an H200
_ROTATED_BYTES = 200 * 2**20  # four times the L2
_MOST_SETS = 8
_GRAPH_FLOPS = 1e12  # a millisecond of FP8: the few microseconds between two graphs do not count


def timed_block(calls: Sequence[Call], count: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Run calls in turn, ``count`` in all; return the events before and after, not awaited."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for i in range(count):
        calls[i % len(calls)]()
    end.record()
    return start, end


def middle_mean(values: Sequence[float]) -> float:
    """The mean of the middle half: as deaf to outliers as the median, and steadier."""
    cut = len(values) // 4
    return fmean(sorted(values)[cut : len(values) - cut])


def round_robin(
    candidates: Mapping[str, Sequence[Call]], rounds: int = 20, block_ms: float = 12.0
) -> dict[str, float]:
    """Milliseconds a call of each candidate, under sustained load: ``middle_mean`` of its blocks.

    Every candidate runs in turn in short blocks, so that all share one power and temperature
    state. The order is drawn anew every other round, and reversed in between: no candidate comes
    first, or follows the one that heats or cools the card most, more often than another. Each
    cycles through its own list of calls (rotating inputs), so that nothing is found in L2. Host
    time counts where it is longer than device time, as in training: each block begins with an idle
    GPU, on which no other candidate's work hides it, and with a call that is not timed. Two rounds
    warm up.
    """
    names = list(candidates)
    counts = {}
    for name in names:
        for call in candidates[name]:
            call()
        start, end = timed_block(candidates[name], 3)
        end.synchronize()
        counts[name] = max(1, round(block_ms * 3 / start.elapsed_time(end)))
    times: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    turns = list(names)
    for turn in range(rounds + 2):
        turns = turns[::-1] if turn % 2 else order.sample(names, len(names))
        blocks = []
        for name in turns:
            torch.cuda.synchronize()
            candidates[name][-1]()
            blocks.append((name, timed_block(candidates[name], counts[name])))
        torch.cuda.synchronize()
        for name, (start, end) in blocks if turn >= 2 else ():
            times[name].append(start.elapsed_time(end) / counts[name])
    return {name: middle_mean(values) for name, values in times.items()}


def by_mode(ms: Mapping[str, float], name: str) -> dict[str, Any]:
    """Return a variant's columns: milliseconds by mode, and speed-ups over bf16; None if untimed.

    The keys of ``ms`` are ``variant/mode``. The modes are those of bf16.
    """
    row: dict[str, Any] = {}
    for mode in (mode for mode in MODES if f"bf16/{mode}" in ms):
        found = ms.get(f"{name}/{mode}")
        row[f"{mode}_ms"] = None if found is None else round(found, 3)
        row[f"{mode}_speedup"] = None if found is None else round(ms[f"bf16/{mode}"] / found, 3)
    return row


def peaks_by_mode(peaks: Mapping[str, int], name: str) -> dict[str, float]:
    """Return a variant's columns of peaks, in MiB and over bf16; keys as in :func:`by_mode`."""
    row: dict[str, float] = {}
    for mode in MODES:
        if f"{name}/{mode}" in peaks:
            row[f"{mode}_peak_mib"] = round(peaks[f"{name}/{mode}"] / 2**20, 1)
            ratio = peaks[f"{name}/{mode}"] / peaks[f"bf16/{mode}"]
            row[f"{mode}_peak_of_bf16"] = round(ratio, 3)
    return row


def graphed(*calls: Call, repeats: int = 1) -> Call:
    """Return one replayed CUDA graph of ``calls`` in turn, ``repeats`` times over: no host time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for call in calls:
                call()
    return graph.replay


def graph_repeats(flops: float) -> int:
    """Return how often a graph must repeat calls of ``flops`` in all to be long enough."""
    return max(1, math.ceil(_GRAPH_FLOPS / flops))


def flushed(call: Call) -> float:
    """Median milliseconds of one call with L2 flushed before each (``triton.testing.do_bench``).

    The flush hides some 60 us of host time; what takes longer shows.
    """
    from triton.testing import do_bench

    call()
    return float(do_bench(call, warmup=5, rep=30, return_mode="median"))


def flushed_device(call: Call, repeats: int = 100) -> float:
    """Time like ``flushed``, but start the GPU when all launches are queued: without host time.

    On a busy machine one launch can take longer than the flush before it.
    """
    flush = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda")

    def measure(count: int) -> list[float]:
        blocks = []
        for _ in range(count):
            flush.zero_()
            blocks.append(timed_block([call], 1))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in blocks]

    measure(3)
    start = time.perf_counter()
    measure(10)
    a_launch = (time.perf_counter() - start) / 10
    # twice as long as the launches took while they waited for the GPU, at 2 GHz
    torch.cuda._sleep(int(2 * a_launch * repeats * 2e9))
    return median(measure(repeats))


def copy_bandwidth() -> float:
    """Device-to-device copy, GB/s of bytes read plus written: the roofline of the casts."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / flushed(lambda: target.copy_(source)) * 1e-6


class Case(Protocol):
    """One shape: how many flops a call takes, and how many bytes it reads."""

    @property
    def flops(self) -> int: ...

    @property
    def read(self) -> int: ...


_Case = TypeVar("_Case", bound=Case)


def sets_of(read: int) -> int:
    """Return the number of sets of inputs that must rotate so that none is found in L2."""
    return max(1, min(_MOST_SETS, -(-_ROTATED_BYTES // read)))


def kept(call: Call) -> Call:
    """``call`` with its last result alive, so that each set of inputs has its own output."""
    result: list[object] = [None]

    def run() -> None:
        result[0] = call()

    return run


def times_of(
    case: _Case,
    make_inputs: Callable[[_Case], Any],
    ours: Callable[[_Case], Mapping[str, Maker]],
    others: Callable[[_Case], Mapping[str, Maker]],
    rounds: int,
) -> tuple[dict[str, float], str]:
    """:func:`times` of the candidates for one shape."""
    count = sets_of(case.read)
    return times(
        [make_inputs(case) for _ in range(count)],
        ours(case),
        others(case),
        repeats=graph_repeats(case.flops * count),
        rounds=rounds,
    )


def times(
    sets: Sequence[Any],
    ours: Mapping[str, Maker],
    others: Mapping[str, Maker],
    *,
    repeats: int,
    rounds: int,
) -> tuple[dict[str, float], str]:
    """Milliseconds a call of each candidate in one round robin, and a note on those that failed.

    Args:
        sets: of inputs, which the calls go through in turn.
        ours: they may not fail.
        others: one that raises is named in the note and has no time; one that cannot be captured in
            a CUDA graph is timed without.
        repeats: of all sets in one graph.
        rounds: of the round robin.
    """
    alive: list[Call] = []  # what calls hold, a graph does not: it reads their memory all the same
    notes: list[str] = []
    timed: dict[str, list[Call]] = {}
    calls_in: dict[str, int] = {}
    for name, maker in {**ours, **others}.items():
        try:
            calls = [kept(maker(inputs)) for inputs in sets]
            calls[0]()
        except Exception as error:  # whatever a peer raises, it declines this shape
            if name in ours:
                raise
            notes.append(f"{name} declines: {type(error).__name__} {str(error)[:100]}".strip())
            continue
        alive += calls
        try:
            timed[name] = [graphed(*calls, repeats=repeats)]
            calls_in[name] = len(calls) * repeats
        except RuntimeError:
            if name in ours:
                raise
            notes.append(f"{name} eager: cannot be captured")
            timed[name], calls_in[name] = calls, 1
    ms = round_robin(timed, rounds=rounds, block_ms=4.0)
    alive.clear()
    return {name: ms[name] / calls_in[name] for name in timed}, "; ".join(notes)
