"""Variants in processes of their own, which take turns on one GPU.

In one process, what a library patches or compiles changes others: eight compiled models beside it
slowed torchao's tensorwise linears to a third. The processes start together and compile in
parallel. Then one at a time runs, in short blocks and in a drawn order, as in
:func:`~.timing.round_robin`.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .memory import peak
from .timing import Call, middle_mean, timed_block

Prepare = Callable[[str], Mapping[str, Call]]
"""Makes the calls of a variant by mode. Pickled: a function of a module, perhaps a partial."""

Clock = Callable[[Call, int], float]
"""Runs a call so often; returns milliseconds a call."""


def on_gpu(call: Call, count: int) -> float:
    """Return milliseconds a call, by events of the GPU, after a call that warms up."""
    call()
    start, end = timed_block([call], count)
    end.synchronize()
    return start.elapsed_time(end) / count


def measured_in_turns(
    names: Sequence[str],
    prepare: Prepare,
    rounds: int,
    block_ms: float = 60.0,
    clock: Clock = on_gpu,
    peak_of: Callable[[Call], Any] = peak,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return milliseconds a call, and peak bytes or what ``peak_of`` returns, by ``variant/mode``.

    Raises:
        RuntimeError: with the traceback of a variant that failed.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # of each process
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Any] = {}
    processes = []
    for name in names:
        pipes[name], theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, prepare, name, clock, peak_of), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
    try:
        return _turns(pipes, rounds, block_ms)
    finally:
        for process in processes:
            process.kill()
            process.join()


def in_groups(names: Sequence[str], at_once: int) -> Iterator[tuple[list[str], list[str]]]:
    """Yield variants that fit on a GPU together, and those of them that are new.

    The first variant, with which all are compared, is in every group, beside ``at_once`` others.
    """
    for first in range(1, len(names), at_once):
        some = [names[0], *names[first : first + at_once]]
        yield some, some[first > 1 :]


def _turns(
    pipes: Mapping[str, Any], rounds: int, block_ms: float
) -> tuple[dict[str, float], dict[str, Any]]:
    keys = [(name, mode) for name, pipe in pipes.items() for mode in _answer(name, pipe)]

    def ask(key: tuple[str, str], count: int) -> Any:
        name, mode = key
        pipes[name].send((mode, count))
        return _answer(name, pipes[name])

    peaks = {"/".join(key): ask(key, 0) for key in keys}
    counts = {key: max(1, round(block_ms / ask(key, 3))) for key in keys}
    times: dict[str, list[float]] = {"/".join(key): [] for key in keys}
    order, turns = random.Random(0), keys
    for turn in range(rounds):
        turns = turns[::-1] if turn % 2 else order.sample(keys, len(keys))
        for key in turns:
            times["/".join(key)].append(ask(key, counts[key]))
    return {key: middle_mean(found) for key, found in times.items()}, peaks


def _answer(name: str, pipe: Any) -> Any:
    try:
        found = pipe.recv()
    except EOFError:
        raise RuntimeError(f"{name}: its process has ended, perhaps for want of memory") from None
    if isinstance(found, tuple):
        raise RuntimeError(found[0])
    return found


def _serve(
    pipe: Any, prepare: Prepare, name: str, clock: Clock, peak_of: Callable[[Call], Any]
) -> None:
    """Prepare, answer with the modes, and then each request with a time, or a peak for 0 calls."""
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does; docs/faq.md
    try:
        calls = prepare(name)
        for call in calls.values():  # compiles
            call()
        answer: Any = [*calls]
        while True:
            if torch.cuda.is_initialized():  # processes that wait hold no cache
                torch.cuda.empty_cache()
            pipe.send(answer)
            mode, count = pipe.recv()
            answer = clock(calls[mode], count) if count else peak_of(calls[mode])
    except Exception:
        pipe.send((f"{name}:\n{traceback.format_exc()}",))
