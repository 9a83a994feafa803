"""The calls by which a process changes a disk, in order; any of them can be its last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CALLS = ("mkdir", "rename", "replace", "link", "unlink", "rmdir", "fsync", "chmod")


class Killed(BaseException):
    """The process is gone: nothing that it would do later happens."""


def _subject(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if name == "fsync":
        return os.readlink(f"/proc/self/fd/{args[0]}")
    paths = [os.fspath(x) for x in args if isinstance(x, (str, Path))]
    if kwargs.get("dir_fd") is not None:
        paths = [os.path.join(os.readlink(f"/proc/self/fd/{kwargs['dir_fd']}"), x) for x in paths]
    return " -> ".join(paths)


@contextmanager
def disk_steps(at: int | None = None, error: BaseException | None = None) -> Iterator[list[str]]:
    """Record the calls as ``"rename a -> b"``; the one numbered ``at`` (from 1) raises ``error``.

    After :class:`Killed` all later calls raise it too, so that handlers and cleanup do nothing.
    """
    steps: list[str] = []
    dead = False

    def watched(name: str) -> Any:
        call = getattr(os, name)

        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal dead
            if dead:
                raise Killed
            steps.append(f"{name} {_subject(name, args, kwargs)}")
            if len(steps) == at:
                assert error is not None
                dead = isinstance(error, Killed)
                raise error
            return call(*args, **kwargs)

        return step

    with pytest.MonkeyPatch.context() as patched:
        for name in CALLS:
            patched.setattr(os, name, watched(name))
        yield steps
