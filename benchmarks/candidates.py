"""Several kernels for one product, timed together: CUDA graphs over sets of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from .timing import Call, graph_repeats, graphed, round_robin

Maker = Callable[[Any], Call]
"""Of a set of inputs: the call that multiplies, or casts, them."""


class Case(Protocol):
    """One shape: how many flops a call takes, and how many bytes it reads."""

    @property
    def flops(self) -> int: ...

    @property
    def read(self) -> int: ...


_Case = TypeVar("_Case", bound=Case)

_ROTATED_BYTES = 200 * 2**20  # four times the L2 of an H200
_MOST_SETS = 8


def sets_of(read: int) -> int:
    """How many sets of inputs rotate, of which a call reads so many bytes: none is found in L2."""
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
    """:func:`times` of the candidates for one shape, on a stream of their own."""
    count = sets_of(case.read)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # drafts launch on the stream that they were made on
        return times(
            [make_inputs(case) for _ in range(count)],
            ours(case),
            others(case),
            repeats=graph_repeats(case.flops * count),
            rounds=rounds,
            stream=stream,
        )


def times(
    sets: Sequence[Any],
    ours: Mapping[str, Maker],
    others: Mapping[str, Maker],
    *,
    repeats: int,
    rounds: int,
    stream: torch.cuda.Stream,
) -> tuple[dict[str, float], str]:
    """Milliseconds a call of each candidate in one round robin, and a note on those that failed.

    Args:
        sets: of inputs, which the calls go through in turn.
        ours: they may not fail.
        others: one that raises is named in the note and has no time; one that cannot be captured in
            a CUDA graph is timed without.
        repeats: of all sets in one graph.
        rounds: of the round robin.
        stream: for calls that remember the stream that they were made on; it is the current one.
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
            timed[name] = [graphed(*calls, repeats=repeats, stream=stream)]
            calls_in[name] = len(calls) * repeats
        except RuntimeError:
            if name in ours:
                raise
            notes.append(f"{name} eager: cannot be captured")
            timed[name], calls_in[name] = calls, 1
    ms = round_robin(timed, rounds=rounds, block_ms=4.0)
    stream.synchronize()
    alive.clear()
    return {name: ms[name] / calls_in[name] for name in timed}, "; ".join(notes)
