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
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.garbage import collect_seldom

TIMEOUT = 240.0
"""Seconds that a call may take, imports on two busy cores included."""

# Other libraries alone: the server of processes may find another blocktensor than the tests do.
_IMPORTED_ONCE = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
    "pytest",
    "triton",
    "torch._dynamo",  # which every optimizer imports, in seconds
    "torch._inductor.compile_fx",  # which torch.compile imports, with any backend
    "transformers.modeling_utils",
    "peft",
]
_HEAP = re.compile(r"^(malloc|free|realloc|calloc)\(\): |^corrupted |^double free", re.MULTILINE)
_GRACE = 1.0  # seconds for more ranks to fail once one has
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

Test = Callable[..., None]


class HeapCorrupted(RuntimeError):
    """A rank died by a segmentation fault, or was ended by malloc or free."""


def on_ranks(*worlds: int, gpus: Sequence[int] | None = None) -> Callable[[Test], Test]:
    """Make a test of a function that runs on every rank of a group.

    The function takes by name what it needs of ``world``, the number of ranks, ``device``,
    ``"cpu"`` or ``"cuda"``, ``mesh``, of all ranks, ``monkeypatch``, of this rank, and whatever
    else pytest gives the test. Ranks start once for each ``world`` and ``device``, and run one test
    after the other; a test that fails ends them.

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
            call_on_ranks(world, device, _run_test, test, world=world, device=device, **others)

        of_pytest = inspect.signature(test).parameters.keys() - {"mesh", "monkeypatch"}
        names = sorted({"world", "device", *of_pytest})
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(parameters)
        return test

    return as_test


def call_on_ranks(
    world: int, device: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> list[Any]:
    """:meth:`_Group.call` of the shared group; on the CPU once more if a heap was corrupted."""

    def attempt() -> list[Any]:
        return _shared(world, device).call(function, *args, **kwargs)

    folders = [x for x in kwargs.values() if isinstance(x, Path)]
    return _once_more(attempt, folders) if device == "cpu" else attempt()


def _once_more(attempt: Callable[[], list[Any]], folders: Sequence[Path] = ()) -> list[Any]:
    """Return what ``attempt`` returns, or a second one if a heap was corrupted in the first.

    The second one finds ``folders`` empty, as the first did.

    Functional collectives of torch 2.13 over gloo do that, without blocktensor too: about once in
    40,000 rounds of four that were in flight at a time, between pairs of 4 ranks.
    """
    try:
        return attempt()
    except HeapCorrupted as error:
        sys.stderr.write(f"once more, since {error}\n")
    for folder in folders:
        shutil.rmtree(folder)
        folder.mkdir()
    return attempt()


def _run_test(test: Test, **given: Any) -> None:
    """In a rank: the function that :func:`on_ranks` has made a test of."""
    torch.use_deterministic_algorithms(True)  # as conftest.py does for every test
    function = inspect.unwrap(test)
    takes = inspect.signature(function).parameters
    with pytest.MonkeyPatch.context() as given["monkeypatch"]:
        try:
            if "mesh" in takes:
                given["mesh"] = init_device_mesh(given["device"], (given["world"],))
            function(**{name: given[name] for name in takes})
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


def run(
    function: Callable[[int, int, str], Any], world: int, folder: Path, start: Path | None = None
) -> list[Any]:
    """``function(rank, world, folder)`` on new ranks on the CPU; what each returned, in order.

    Args:
        folder: made anew, for a second attempt too.
        start: a folder that it begins as a copy of; by default it is empty.

    Raises:
        RuntimeError: with the traceback of each rank that failed.
    """

    def attempt() -> list[Any]:
        if folder.exists():
            shutil.rmtree(folder)
        if start is None:
            folder.mkdir()
        else:
            shutil.copytree(start, folder)
        group = _Group(world, "cpu")
        try:
            return group.call(_run_on_rank, function, world, str(folder))
        finally:
            group.close()

    return _once_more(attempt)


def _run_on_rank(function: Callable[[int, int, str], Any], world: int, folder: str) -> Any:
    return function(dist.get_rank(), world, folder)


def forking() -> Any:
    """The context of processes that start with torch imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


class _Group:
    """Ranks that wait for calls; ``options``: of ``init_process_group``."""

    def __init__(self, world: int, device: str, **options: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        # libraries count GPUs when they are imported, and CUDA starts in no fork of such a process
        context = forking() if device == "cpu" else multiprocessing.get_context("spawn")
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = rank, world, device, self._folder.name, theirs, options
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
        self.begin(function, *args, **kwargs)
        try:
            return self.answers()
        except BaseException:  # a time limit or Ctrl-C, too: later calls would get these answers
            self.close()
            raise

    def begin(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Begin a :meth:`call`."""
        work = pickle.dumps((function, args, kwargs))
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # a process that died is noticed later
                pipe.send_bytes(work)

    def answers(self) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        kind = RuntimeError
        until = time.monotonic() + TIMEOUT
        waiting = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        while waiting and (ready := connection.wait(waiting, max(until - time.monotonic(), 0))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    error, results[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    error, is_heap = self._death_of(rank)
                    kind = HeapCorrupted if is_heap else kind
                if error is not None:
                    errors[rank] = error
                    until = min(until, time.monotonic() + _GRACE)
        if waiting or errors:
            lines = [f"rank {rank}:\n{error}" for rank, error in sorted(errors.items())]
            missing = [f"waiting: {[*waiting.values()]}"] if waiting else []
            raise kind("\n".join([*lines, *missing]))
        return [result for _, result in sorted(results.items())]

    def _death_of(self, rank: int) -> tuple[str, bool]:
        """Why a process died, and whether its heap was corrupted."""
        self._processes[rank].join()
        code = self._processes[rank].exitcode
        said = _stderr(self._folder.name, rank).read_text(errors="replace")
        is_heap = code == -signal.SIGABRT and _HEAP.search(said) is not None
        error = f"the process died with exit code {code}\n{said[-8000:]}"
        return error, code == -signal.SIGSEGV or is_heap

    def close(self) -> None:
        self.is_open = False
        atexit.unregister(self.close)
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._folder.cleanup()


_groups: dict[tuple[int, str], _Group] = {}


def _shared(world: int, device: str) -> _Group:
    """The ranks that tests share; new ones if a test has failed on them."""
    group = _groups.get((world, device))
    if group is None or not group.is_open:
        group = _groups[world, device] = _Group(world, device)
    return group


def _stderr(folder: str, rank: int) -> Path:
    """The file that a rank's stderr goes to: what it says before it dies is in the test's error."""
    return Path(folder, f"stderr_{rank}")


def _serve(rank: int, world: int, device: str, folder: str, pipe: Any, options: Any) -> None:
    """A rank: answers one call after the other, until the other end of the pipe is gone."""
    with _stderr(folder, rank).open("wb") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    collect_seldom()
    try:
        torch.set_num_threads(1)
        if device == "cuda":
            torch.cuda.set_device(rank)
            # torch waits four times as long between a lost collective and the end of the process
            os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"
        options |= {"rank": rank, "world_size": world, "init_method": f"file://{folder}/store"}
        dist.init_process_group(_BACKENDS[device], **options)
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
