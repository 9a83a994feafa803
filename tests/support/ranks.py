"""Processes that run tests as ranks: they talk through gloo on the CPU, through NCCL on GPUs."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import inspect
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TIMEOUT = 240.0
"""Seconds that a call may take, imports on two busy cores included."""

# Of torch alone: the server of processes may find another blocktensor than the tests do.
_IMPORTED_ONCE = ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "pytest"]
_HEAP = re.compile(r"^(malloc|free|realloc|calloc)\(\): |^corrupted |^double free", re.MULTILINE)
_GRACE = 2.0  # seconds for more ranks to fail once one has
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

Test = Callable[..., None]


class HeapCorrupted(RuntimeError):
    """A rank died by a segmentation fault, or was ended by malloc or free."""


def on_ranks(*worlds: int, gpus: Sequence[int] | None = None) -> Callable[[Test], Test]:
    """Make a test of a function that runs on every rank of a group.

    The function takes ``world``, the number of ranks, ``device``, ``"cpu"`` or ``"cuda"``, and by
    name whatever else pytest gives the test. Ranks start once for each ``world`` and ``device``,
    and run one test after the other; a test that fails ends them.

    Args:
        worlds: on the CPU.
        gpus: on GPUs, of which there must be as many; by default as ``worlds``.
    """
    cases = [pytest.param(world, "cpu", id=f"{world} ranks") for world in worlds]
    for world in worlds if gpus is None else gpus:
        lacking = pytest.mark.skipif(
            torch.cuda.device_count() < world, reason=f"needs {world} GPUs"
        )
        marks = [pytest.mark.multi_gpu, lacking]
        cases.append(pytest.param(world, "cuda", id=f"{world} GPUs", marks=marks))

    def as_test(function: Test) -> Test:
        @pytest.mark.parametrize(("world", "device"), cases)
        @functools.wraps(function)
        def test(world: int, device: str, **others: Any) -> None:
            others |= {"world": world, "device": device}
            call_on_ranks(world, device, _run_test, test, **others)

        return test

    return as_test


def call_on_ranks(
    world: int, device: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> list[Any]:
    """:meth:`_Group.call` of the shared group; on the CPU once more if a heap was corrupted.

    Functional collectives of torch 2.13 over gloo do that, without blocktensor too: about once in
    40,000 rounds of four that were in flight at a time, between pairs of 4 ranks.
    """
    try:
        return _shared(world, device).call(function, *args, **kwargs)
    except HeapCorrupted as error:
        if device != "cpu":
            raise
        sys.stderr.write(f"once more, since {error}\n")
    return _shared(world, device).call(function, *args, **kwargs)


def _run_test(test: Test, **arguments: Any) -> None:
    """In a rank: the function that :func:`on_ranks` has made a test of."""
    torch.use_deterministic_algorithms(True)  # as conftest.py does for every test
    try:
        inspect.unwrap(test)(**arguments)
    finally:
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()


@functools.cache
def shared_mesh(device: str, *shape: int, names: tuple[str, ...]) -> DeviceMesh:
    """The mesh of this rank's group that all tests share.

    Each process group of a mesh has threads and sockets until the process ends: it cannot be
    destroyed, since torch's caches of DTensor ops serve later meshes that are equal with it.
    """
    return init_device_mesh(device, shape, mesh_dim_names=names)


def run(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """``function(rank, world, *args)`` on new ranks on the CPU; what each returned, in order.

    Raises:
        RuntimeError: with the traceback of each rank that failed.
    """
    with _started(world, "cpu") as group:
        return group.call(_run_on_rank, function, world, *args)


def _run_on_rank(function: Callable[..., Any], world: int, *args: Any) -> Any:
    return function(dist.get_rank(), world, *args)


def forking() -> Any:
    """The context of processes that start with torch imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


class _Group:
    """Ranks that wait for calls."""

    def __init__(self, world: int, device: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self._calls: list[str] = []
        context = forking()
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = rank, world, device, self._folder.name, theirs
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.is_open = True
        atexit.register(self.close)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """``function(*args, **kwargs)`` on every rank; what each returned, in order.

        Raises:
            RuntimeError: with the traceback of each rank that failed. The group is closed then.
        """
        self._calls.append(_named(function, args, kwargs))
        try:
            return self._call(pickle.dumps((function, args, kwargs)))
        except BaseException:  # a time limit or Ctrl-C, too: later calls would get these answers
            self.close()
            raise

    def _call(self, work: bytes) -> list[Any]:
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # a process that died is noticed below
                pipe.send_bytes(work)
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        kind = RuntimeError
        until = time.monotonic() + TIMEOUT
        while waiting := [i for i in range(len(self._pipes)) if i not in {**results, **errors}]:
            left = until - time.monotonic()
            ready = connection.wait([self._pipes[rank] for rank in waiting], max(left, 0))
            if not ready:
                break
            for rank in [rank for rank in waiting if self._pipes[rank] in ready]:
                try:
                    error, result = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join()
                    code = self._processes[rank].exitcode
                    said = _stderr(self._folder.name, rank).read_text(errors="replace")
                    calls = "\n".join(self._calls)
                    if code == -signal.SIGSEGV or (code == -signal.SIGABRT and _HEAP.search(said)):
                        kind = HeapCorrupted
                    said = f"{said[-8000:]}\nits calls, in order:\n{calls}"
                    error, result = f"the process died with exit code {code}\n{said}", None
                if error is None:
                    results[rank] = result
                else:
                    errors[rank] = error
                    until = min(until, time.monotonic() + _GRACE)
        if waiting or errors:
            lines = [f"rank {rank}:\n{error}" for rank, error in sorted(errors.items())]
            raise kind("\n".join([*lines, *([f"waiting: {waiting}"] if waiting else [])]))
        return [result for _, result in sorted(results.items())]

    def close(self) -> None:
        """End the processes."""
        self.is_open = False
        atexit.unregister(self.close)
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._folder.cleanup()


def _named(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """A call of :meth:`_Group.call`, on one line."""
    called = args[0] if args and callable(args[0]) else function
    others = {k: v for k, v in kwargs.items() if k not in ("world", "device")}
    return f"{called.__module__}.{called.__qualname__} {others or ''}".rstrip()


_groups: dict[tuple[int, str], _Group] = {}


def _shared(world: int, device: str) -> _Group:
    """The ranks that tests share; new ones if a test has failed on them."""
    group = _groups.get((world, device))
    if group is None or not group.is_open:
        group = _groups[world, device] = _Group(world, device)
    return group


@contextmanager
def _started(world: int, device: str) -> Iterator[_Group]:
    group = _Group(world, device)
    try:
        yield group
    finally:
        group.close()


def _stderr(folder: str, rank: int) -> Path:
    """The file that a rank's stderr goes to: what it says before it dies is in the test's error."""
    return Path(folder, f"stderr_{rank}")


def _serve(rank: int, world: int, device: str, folder: str, pipe: Any) -> None:
    """A rank: answers one call after the other, until the other end of the pipe is gone."""
    with _stderr(folder, rank).open("wb") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    try:
        torch.set_num_threads(1)
        if device == "cuda":
            torch.cuda.set_device(rank)
        where = f"file://{folder}/store"
        dist.init_process_group(_BACKENDS[device], init_method=where, rank=rank, world_size=world)
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
        raise
    while True:
        try:
            work = pipe.recv_bytes()
        except EOFError:
            os._exit(0)  # nobody is left to say goodbye to
        try:
            function, args, kwargs = pickle.loads(work)
            answer = pickle.dumps((None, function(*args, **kwargs)))
            if device == "cuda":
                torch.cuda.synchronize()
        except BaseException:
            answer = pickle.dumps((traceback.format_exc(), None))
        pipe.send_bytes(answer)
