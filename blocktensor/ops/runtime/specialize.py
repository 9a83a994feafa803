"""The one mechanism that decides once (docs/design/deciding_once.md).

The checks of an op, its backend and its launches depend on shapes, strides, dtypes, alignment and
device, never on values. A :class:`Specialized` function decides them at the first call of a kind
and finds the decision under one key afterwards. Where the decision is a sequence of launches,
``replay.py`` records and repeats it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .launch import is_watched

GEMM_VARIABLE = "BLOCKTENSOR_GEMM"
"""Environment variable that forces a GEMM backend by name; part of every key."""

MAX_KEYS = 4096
"""Decisions in one table; the oldest is then dropped and made anew when its kind returns."""

PLAIN = (Tensor, nn.Parameter)
"""Types of tensors that have memory: neither fake nor wrappers."""

Result = TypeVar("Result")

# os.environ's own dictionary, where it has one: reading through os.environ costs a microsecond.
_environment: Any = getattr(os.environ, "_data", os.environ)
_VARIABLE: Any = GEMM_VARIABLE
if _environment is not os.environ:
    _VARIABLE = os.environ.encodekey(GEMM_VARIABLE)
_dispatch_modes = torch._C._len_torch_dispatch_stack


def forced_gemm() -> str | None:
    """The backend that ``BLOCKTENSOR_GEMM`` names now, if any."""
    return os.environ.get(GEMM_VARIABLE) or None


def must_dispatch(*tensors: Tensor) -> bool:
    """True if an op on these tensors must go through the dispatcher.

    That is while a compiler traces, under a dispatch mode (but for the one that records launches),
    and for tensors without memory.
    """
    if is_compiling():
        return True
    for x in tensors:
        if type(x) not in PLAIN or x.is_meta:
            return True
    return _dispatch_modes() > 0 and not is_watched()


def key_of(*args: Any) -> Hashable:
    """The layout of tensors, also inside tuples (``Quantized``), and all other arguments."""
    parts: list[Any] = []
    for x in args:
        if isinstance(x, Tensor):
            parts.append((x.shape, x.stride(), x.dtype, x.data_ptr() & 15, x.device))
        else:
            parts.append(key_of(*x) if isinstance(x, tuple) else x)
    return tuple(parts)


class Specialized(Generic[Result]):
    """A function that is decided once for each kind of arguments.

    Args:
        decide: takes the arguments of a call, returns the function that runs calls of its kind. An
            exception reaches the caller, and nothing is remembered.
        dispatch: called instead if the first argument must go through the dispatcher.

    The key is :func:`key_of` the arguments, with ``BLOCKTENSOR_GEMM``: ``decide`` and its result
    may look at nothing else.

    Threads may share one: two that meet a new kind together both decide, and either result serves.
    """

    __slots__ = ("_decide", "_dispatch", "_table")

    def __init__(
        self, decide: Callable[..., Result], dispatch: Callable[..., Any] | None = None
    ) -> None:
        self._decide, self._dispatch = decide, dispatch
        self._table: dict[Hashable, Result] = {}

    def __call__(self, x: Any, *args: Any) -> Any:
        """Run the function."""
        if self._dispatch is not None and must_dispatch(x[0] if isinstance(x, tuple) else x):
            return self._dispatch(x, *args)
        return self.run(x, *args)

    def run(self, *args: Any) -> Any:
        """Run the function outside the dispatcher."""
        decided: Any = self.find(*args)
        return decided(*args)

    def find(self, *args: Any) -> Result:
        """The decision for calls like this one."""
        key = key_of(*args), _environment.get(_VARIABLE)
        found = self._table.get(key)
        if found is None:
            found = self._decide(*args)
            while len(self._table) >= MAX_KEYS:
                self._table.pop(next(iter(tuple(self._table))), None)
            self._table[key] = found
        return found

    def forget(self) -> None:
        """Decide anew for every kind."""
        self._table.clear()

    def __len__(self) -> int:
        return len(self._table)


def recorded(function: Callable[..., Any], launches: bool = True) -> Callable[..., Any]:
    """``function``, for calls of one kind: its launches are recorded once, then repeated.

    ``launches``: it allocates and launches Triton kernels, and does nothing else (``replay.py``).
    Any other function is returned as it is.
    """
    if not launches:
        return function
    from .replay import Replay  # needs Triton

    return Replay(function)
