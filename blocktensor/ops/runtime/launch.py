"""A kernel launch as a value: planned from tensors, then run, or only compiled (in tests)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..registry import last_line

Kept = TypeVar("Kept", "list[tuple[Launch, Any]]", None)


class _Thread(threading.local):
    """State of the calling thread; the class holds the initial values."""

    launches: list[tuple[Launch, Any]] | None = None
    watch: Callable[..., None] | None = None
    """A function that is called with every op before the thread computes it, and its arguments."""


this_thread = _Thread()

current_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda device: torch.cuda.current_stream(device).cuda_stream,
)
"""Return the address of the caller's stream on a CUDA device, faster than torch.cuda does."""


class Rows(int):
    """A number of rows of the call, and so many ``beyond`` it, as argument of a kernel.

    It may differ between calls of one recording.
    """

    beyond = 0

    def plus(self, beyond: int) -> Rows:
        """Return the number of rows and ``beyond`` more."""
        made = Rows(self + beyond)
        made.beyond = self.beyond + beyond
        return made


class Launch(NamedTuple):
    """A launch of a Triton or Gluon kernel.

    Planning needs shapes, strides and dtypes only: a launch planned from meta tensors can be
    compiled for an absent GPU. ``args`` are integers, :class:`Rows`, tensors and Gluon's host-side
    ``TensorDescriptor`` objects; at least one is a tensor or descriptor. ``options`` say whether a
    multiplication and an addition are fused (``enable_fp_fusion``): Triton's default differs from
    version to version. ``compiling`` is entered while Triton may compile. ``sized`` are outputs
    that have as many rows as :class:`Rows` says. Sizes in descriptors may be :class:`Rows` too.
    """

    kernel: Any
    grid: tuple[int]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]
    compiling: Callable[[], AbstractContextManager[None]] = nullcontext
    sized: tuple[Tensor, ...] = ()

    def __call__(self) -> None:
        """Launch on the current stream of the arguments' device; an empty grid launches nothing.

        This is Triton's own launch. It takes about 45 us of host time, since it binds and
        specialises every argument again. ``player.cpp`` repeats launches in less time.

        Raises:
            RuntimeError: Triton cannot compile the kernel for this GPU.
        """
        if self.grid[0] == 0:
            return
        device = next(t.device.index for t in map(pointed_at, self.args) if t is not None)
        args = [int(x) if type(x) is Rows else x for x in self.args]
        try:
            with torch.cuda.device(device), self.compiling():  # Triton takes the current device
                compiled = self.kernel[self.grid](*args, **self.constants, **self.options)
        except Exception as error:
            from .triton_compat.compiler import is_failed_compilation  # needs Triton

            if not is_failed_compilation(error):
                raise
            name = self.kernel.__name__
            raise RuntimeError(
                f"Triton does not compile {name} for this GPU: {last_line(error)}. Install a "
                f"Triton from 3.6 to 3.9, or set BLOCKTENSOR_FAST_PATH=0: no kernels in Gluon"
            ) from error
        if this_thread.launches is not None:
            this_thread.launches.append((self, compiled))


def pointed_at(arg: Any) -> Tensor | None:
    """Return the tensor that a kernel argument points at, directly or as a TensorDescriptor."""
    arg = getattr(arg, "base", arg)
    return arg if isinstance(arg, Tensor) else None


def watch_launches() -> AbstractContextManager[list[tuple[Launch, Any]]]:
    """Collect this thread's launches, each with its compiled kernel, until the ``with`` ends."""
    return _launches_in([])


def not_recorded() -> AbstractContextManager[None]:
    """Keep this thread's launches out of :func:`watch_launches` until the ``with`` ends."""
    return _launches_in(None)


@contextmanager
def _launches_in(launches: Kept) -> Iterator[Kept]:
    outer, this_thread.launches = this_thread.launches, launches
    try:
        yield launches
    finally:
        this_thread.launches = outer
