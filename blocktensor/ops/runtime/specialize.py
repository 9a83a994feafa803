"""Functions that are decided once for each kind of call (docs/design/deciding_once.md).

The checks of an op, its backend and its launches depend on shapes, strides, dtypes, alignment and
device, never on values. A :class:`Specialized` function decides them at the first call of a kind
and finds the decision under one key afterwards. Where the decision is a sequence of launches,
``replay.py`` records and repeats it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..devices import has_triton
from ..formats import Quantized, group_rows
from .launch import this_thread

GEMM_VARIABLE = "BLOCKTENSOR_GEMM"
"""Environment variable that forces a GEMM backend by name; part of every key."""

MAX_KEYS = 4096
"""Most decisions in one table; beyond it the oldest is dropped, and made again if needed."""

PLAIN = (Tensor, nn.Parameter)
"""Types of tensors that have memory: neither fake nor wrappers."""

Result = TypeVar("Result")

# The dictionary of os.environ, if it has one: a read through os.environ takes a microsecond.
_environment: Any = getattr(os.environ, "_data", os.environ)
_VARIABLE: Any = GEMM_VARIABLE
if _environment is not os.environ:
    _VARIABLE = os.environ.encodekey(GEMM_VARIABLE)
_dispatch_modes = torch._C._len_torch_dispatch_stack


def forced_gemm() -> str | None:
    """Return the backend that ``BLOCKTENSOR_GEMM`` names now, if any."""
    return os.environ.get(GEMM_VARIABLE) or None


def must_dispatch(x: Tensor) -> bool:
    """Return whether an op on ``x`` must go through the dispatcher.

    That is while a compiler traces, under a dispatch mode, and for tensors without memory.
    """
    return is_compiling() or type(x) not in PLAIN or x.is_meta or _dispatch_modes() > 0


def key_of(args: tuple[Any, ...]) -> Hashable:
    """Return the layouts of all tensors, in casts and tuples too, and all other arguments.

    A layout is all that a decision may depend on: sizes, strides, dtype, the address modulo 16 and
    the device. Rows in groups, which an int32 vector of ends says, count in whole steps
    (:func:`_key_of_groups`).

    Written for host time: every eager op builds one key.
    """
    key: list[Any] = []
    for x in args:
        kind = type(x)
        if kind is Quantized:
            data, scale, format = x
            key += (data.shape, data.stride(), data.dtype, data.data_ptr() & 15, data.device)
            key += (scale.shape, scale.stride(), scale.dtype, scale.data_ptr() & 15, scale.device)
            key.append(format)
        elif kind in PLAIN or isinstance(x, Tensor):
            dtype = x.dtype
            if dtype is _ENDS:
                return _key_of_groups(args)
            key += (x.shape, x.stride(), dtype, x.data_ptr() & 15, x.device)
        elif kind is tuple:
            key.append(key_of(x))
        else:
            key.append(x)
    return tuple(key)


_ENDS = torch.int32
"""The dtype of the ends of groups, and of no other argument of an op."""


def _key_of_groups(args: tuple[Any, ...]) -> Hashable:
    """Return :func:`key_of` for rows in groups, whose number is rounded up to whole steps.

    The number of rows is that of the first argument or, if it is no tensor, the first integer.
    Matrices in high precision have exactly as many; casts already have whole steps of rows.
    """
    if isinstance(args[0], Tensor):
        rows = args[0].shape[0]
    else:
        rows = next((x for x in args if type(x) is int), -1)
    key: list[Any] = [group_rows(rows)]
    for x in args:
        if isinstance(x, Tensor):
            size: Any = x.shape
            if x.ndim == 2 and size[0] == rows:
                size = "rows", size[1]
            key += (size, x.stride(), x.dtype, x.data_ptr() & 15, x.device)
        elif type(x) is int and x == rows:
            key.append("rows")
        else:
            key.append(key_of((x,)))
    return tuple(key)


class Specialized(Generic[Result]):
    """A function that is decided once for each kind of arguments.

    Args:
        decide: takes the arguments of a call, returns the function that runs calls of its kind. An
            exception reaches the caller, and nothing is remembered.
        dispatch: called instead if the first argument must go through the dispatcher.

    Decisions may depend on :func:`key_of` the arguments and on ``BLOCKTENSOR_GEMM``.

    Threads may share one: two that meet a new kind together both decide, and either result serves.
    """

    __slots__ = ("_decide", "_dispatch", "_table")

    def __init__(self, decide: Callable[..., Result], dispatch: Any = None) -> None:
        self._decide, self._dispatch = decide, dispatch
        self._table: dict[Hashable, Result] = {}

    def __call__(self, *args: Any) -> Any:
        """Run the function."""
        first = args[0]
        if must_dispatch(first.data if type(first) is Quantized else first):
            if self._dispatch is None or this_thread.launches is not None:
                return self.run(*args)
            return self._dispatch(*args)
        if this_thread.watch is not None:
            return self.run(*args)
        run: Any = self._table.get((key_of(args), _environment.get(_VARIABLE)))
        return self.run(*args) if run is None else run(*args)

    def run(self, *args: Any) -> Any:
        """Run the function outside the dispatcher; plainly, as a part of what is being recorded."""
        if this_thread.watch is not None:
            with watching(None) as watch:  # not the ops that this one runs
                watch(self, args)
                return self.run(*args)
        run: Any = (self.find if this_thread.launches is None else self._decide)(*args)
        return run(*args)

    def find(self, *args: Any) -> Result:
        """Return the decision for calls like this one."""
        return self.find_by(key_of(args), *args)

    def find_by(self, key: Hashable, *args: Any) -> Result:
        """Run :meth:`find` with a key that says as much of ``args`` as the decision depends on."""
        key = key, _environment.get(_VARIABLE)
        found = self._table.get(key)
        if found is None:
            found = self._decide(*args)
            while len(self._table) >= MAX_KEYS:
                self._table.pop(next(iter(tuple(self._table)), None), None)
            self._table[key] = found
        return found

    def forget(self) -> None:
        """Decide anew for every kind."""
        self._table.clear()

    def __len__(self) -> int:
        return len(self._table)


@contextmanager
def watching(watch: Callable[..., None] | None) -> Iterator[Any]:
    """Call ``watch`` with every op that this thread computes, and its arguments, before it runs.

    Matmuls run op by op meanwhile. Yields the function that was called before.
    """
    outer, this_thread.watch = this_thread.watch, watch
    try:
        yield outer
    finally:
        this_thread.watch = outer


SEQUENCES: list[Specialized[Any]] = []
"""The recordings of every sequence."""


def sequence(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that calls several ops: record it once for calls of one kind.

    The kind is :func:`key_of` all arguments. While ops are watched or must go through the
    dispatcher, the function itself runs.
    """
    table = Specialized(lambda *args: recorded(function), function)
    SEQUENCES.append(table)

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        return (table if this_thread.watch is None else function)(*args)

    return run


def recorded(function: Callable[..., Any], launches: bool = True) -> Callable[..., Any]:
    """Record the launches of ``function`` once for calls of one kind, then repeat them.

    Unchanged unless it only allocates and ``launches`` Triton kernels (``replay.py``).
    """
    if not launches or this_thread.launches is not None or not has_triton():
        return function  # it may be a part of what is being recorded
    from .replay import Replay  # needs Triton

    return Replay(function)
