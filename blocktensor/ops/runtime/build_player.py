"""Build ``player.cpp`` at first use, for the torch and the Python that are installed.

The file is compiled once and kept in a cache folder, under a name that contains a digest of
everything that it depends on. Processes that start together wait for the one that compiles. Without
a compiler, Triton's ordinary launches are used, which take more host time; one warning says so.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("player.cpp")
CACHE_VARIABLE = "BLOCKTENSOR_CACHE_DIR"
"""Environment variable: the folder of the compiled file; by default ``~/.cache/blocktensor``."""

SWITCH = "BLOCKTENSOR_PLAYER"
"""Environment variable: with 0 the file is neither built nor used. Read once."""

MODULE = "blocktensor_player"
STANDARDS = ("c++20", "c++17")
"""C++ standards, tried in this order: torch's headers need the first, old compilers lack it."""

SECONDS_TO_WAIT = 300
"""Seconds to wait for another process that compiles; then this process compiles too."""


class CannotBuild(Exception):
    """Raised if ``player.cpp`` cannot be compiled or loaded; the message says why."""


_LOCK = threading.Lock()


def player() -> Any:
    """Return the module of ``player.cpp``; None if there is none, after one warning."""
    with _LOCK:  # threads may record their first calls together
        return _player()


@functools.cache
def _player() -> Any:
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return load()
    except CannotBuild as error:
        warnings.warn(
            f"blocktensor: kernels are launched by Triton itself, which takes several times the "
            f"host time: {error}. Results are the same. {SWITCH}=0 says that this is intended",
            stacklevel=2,
        )
        return None


def why_none() -> str:
    """Return why there is no compiled file in this process; empty if there is one."""
    if os.environ.get(SWITCH) == "0":
        return f"switched off by {SWITCH}=0"
    try:
        load()
    except CannotBuild as error:
        return str(error)
    return ""


@functools.cache
def load() -> Any:
    """Compile ``player.cpp`` if no compiled file is in the cache, and load it.

    Raises:
        CannotBuild: no compiler, no place to write, or an error of the compiler or the loader.
    """
    try:
        import triton

        loaded = module(built())
        loaded.load(triton.knobs.runtime)
    except (ImportError, AttributeError, RuntimeError) as error:
        raise CannotBuild(str(error).partition("\n")[0]) from error
    return loaded


def module(path: Path) -> Any:
    """Load a compiled file.

    Raises:
        CannotBuild: the loader refuses it.
    """
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_loader(MODULE, loader)
    assert spec is not None
    try:
        loaded = importlib.util.module_from_spec(spec)
        loader.exec_module(loaded)
    except ImportError as error:
        raise CannotBuild(f"{path} cannot be loaded: {error}") from error
    return loaded


def built() -> Path:
    """Return the compiled file; compile it unless the cache has it.

    Raises:
        CannotBuild: it cannot be compiled.
    """
    compiler = _compiler()
    name = f"player-{_fingerprint(compiler)}.so"
    for folder in _folders():
        path = folder / name
        if path.exists():
            return path
        with contextlib.suppress(OSError), _locked(folder):
            if not path.exists():
                _compile(_command(compiler), path)
            return path
    raise CannotBuild(f"no folder can be written to; set {CACHE_VARIABLE}")


def _folders() -> Iterator[Path]:
    """Yield folders to keep the compiled file in, the best first."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        yield Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # this user has no home
        yield (Path(cache) if cache else Path.home() / ".cache") / "blocktensor"
    # the home may be read-only: use a folder of this user, to which nobody else can write
    shared = Path(tempfile.gettempdir()) / f"blocktensor-{os.getuid()}"
    with contextlib.suppress(OSError):
        shared.mkdir(mode=0o700, exist_ok=True)
        status = shared.lstat()
        if (
            status.st_uid == os.getuid()
            and stat.S_ISDIR(status.st_mode)
            and not status.st_mode & 0o077
        ):
            yield shared
    yield Path(tempfile.mkdtemp(prefix="blocktensor-"))


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        found = shutil.which(name)
        if found is not None:
            return found
    raise CannotBuild(
        f"no C++ compiler was found (${'CXX' if named else 'CXX, c++, g++, clang++'})"
    )


def _include_folders() -> list[str]:
    import triton

    of_torch = Path(torch.__file__).parent / "include"
    of_cuda = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    api = of_torch / "torch" / "csrc" / "api" / "include"
    return [*map(str, (of_torch, api, of_cuda)), sysconfig.get_paths()["include"]]


def _fingerprint(compiler: str) -> str:
    """Return a digest of everything that the compiled file depends on."""
    parts = (
        SOURCE.read_text(),
        torch.__version__,
        sys.implementation.cache_tag,
        sysconfig.get_platform(),
        *platform.libc_ver(),  # hosts that share a home may have older libraries
        *_command(compiler),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, or go on without it after a while; make the folder."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        deadline = time.monotonic() + SECONDS_TO_WAIT
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        yield


def _command(compiler: str) -> list[str]:
    """Return the command that compiles, but for the standard and the output."""
    of_torch = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    options = ["-O2", "-w", "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME={MODULE}", abi]
    includes = [f"-I{folder}" for folder in _include_folders()]
    # torch has loaded its libraries already, so that their names suffice
    libraries = [f"-L{of_torch / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    return [compiler, *options, *includes, str(SOURCE), *libraries]


def _compile(command: list[str], path: Path) -> None:
    """Compile into a folder of this process, then move the file to ``path``: it is whole there."""
    print(
        f"blocktensor: compiling {SOURCE.name} once for torch {torch.__version__} "
        f"(half a minute), into {path.parent}",
        file=sys.stderr,
    )
    said = ""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        for standard in STANDARDS:
            run = subprocess.run(
                [*command, f"-std={standard}", "-o", str(made)], capture_output=True, text=True
            )
            if run.returncode == 0:
                # where locks do not reach other hosts, one of them may have loaded its file by now:
                # on network file systems it would crash if the file were replaced
                if not path.exists():
                    os.replace(made, path)
                return
            said = said or run.stderr
    error = next((line for line in said.splitlines() if "error" in line), said[-200:])
    raise CannotBuild(f"{command[0]} cannot compile {SOURCE}: {error}")
