"""A kernel launch as a value: planned from tensors, then run, or only compiled (in tests)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Thread(threading.local):
    """State of the calling thread; the class holds the initial values."""

    launches: list[tuple[Launch, Any]] | None = None


this_thread = _Thread()


class Launch(NamedTuple):
    """One launch of a Triton or Gluon kernel.

    Planning needs shapes, strides and dtypes only: a launch planned from meta tensors can be
    compiled for an absent GPU. ``args`` are integers, tensors and Gluon's host-side
    ``TensorDescriptor`` objects over tensors, at least one of the last two kinds.
    """

    kernel: Any
    grid: tuple[int]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]

    def __call__(self) -> None:
        """Launch on the current stream of the arguments' device; an empty grid launches nothing.

        This is Triton's own launch, some 45 us of host time, since it binds and specialises every
        argument again. ``replay.py`` repeats launches in less time.
        """
        if self.grid[0] == 0:
            return
        device = next(t.device.index for t in map(pointed_at, self.args) if t is not None)
        with torch.cuda.device(device):  # Triton launches on the current device
            compiled = self.kernel[self.grid](*self.args, **self.constants, **self.compiler_options)
        if this_thread.launches is not None:
            this_thread.launches.append((self, compiled))

    @property
    def compiler_options(self) -> dict[str, Any]:
        """``options``, and an option whose default depends on the version of Triton."""
        return {"enable_fp_fusion": True, **self.options}


def pointed_at(arg: Any) -> Tensor | None:
    """The tensor that a kernel argument points at, directly or as a TensorDescriptor."""
    arg = getattr(arg, "base", arg)
    return arg if isinstance(arg, Tensor) else None


class watch_launches:
    """Within ``with``: the list of this thread's launches, each with its compiled kernel."""

    def __enter__(self) -> list[tuple[Launch, Any]]:
        self._outer = this_thread.launches
        launches: list[tuple[Launch, Any]] = []
        this_thread.launches = launches
        return launches

    def __exit__(self, *_: object) -> None:
        this_thread.launches = self._outer


class Recording:
    """A function whose launches are recorded at its first call (``replay.py``).

    Attributes:
        player: the function to call from then on; None until then.
    """

    __slots__ = ("player",)

    def __init__(self) -> None:
        self.player: Callable[..., Any] | None = None
