"""Decide functions once for each kind of call (docs/design/deciding_once.md).

The checks of an op, its backend and its launches depend on shapes, strides, dtypes, alignment and
device, never on values. A :class:`Specialized` function decides them at the first call of a kind
and finds the decision under one key afterwards. Where the decision is a sequence of launches,
``record.py`` records it and ``player.cpp`` repeats it.
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
from . import build_player, check_recordings
from .launch import this_thread

GEMM_VARIABLE = "BLOCKTENSOR_GEMM"
"""Environment variable that forces a GEMM backend by name; part of every key."""

MAX_KEYS = 4096
"""Most decisions in one table; then the oldest is dropped, and made again if needed."""

PLAIN = (Tensor, nn.Parameter)
"""Types of plain tensors, which have memory."""

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
    """Return True if an op on ``x`` must go through the dispatcher.

    It must while a compiler traces, under a dispatch mode, and for tensors without memory.
    """
    return is_compiling() or type(x) not in PLAIN or x.is_meta or _dispatch_modes() > 0


def key_of(args: tuple[Any, ...]) -> Hashable:
    """Return the layouts of all tensors, also in casts and tuples, and all other arguments.

    A layout is all that a decision may depend on: sizes, strides, dtype, the address modulo 16, the
    device, and if the memory has the other sign (``is_neg``), which a kernel does not see. If there
    is an int32 vector, the ends of groups, numbers of rows are rounded up (:func:`_key_of_groups`).

    It is written for speed: every eager op builds one key.
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
            key += (x.shape, x.stride(), dtype, x.data_ptr() & 15, x.device, x.is_neg())
        elif kind is tuple:
            key.append(key_of(x))
        else:
            key.append(x)
    return tuple(key)


_ENDS = torch.int32
"""The dtype of the ends of groups; no other argument of an op has it."""


def _key_of_groups(args: tuple[Any, ...]) -> Hashable:
    """Return :func:`key_of` for rows in groups, whose number is rounded up to ``GROUP_STEP``.

    The first argument has this number of rows; if it is not a tensor, the first integer is the
    number. Matrices in high precision have exactly as many; rows of casts are rounded up already.
    """
    if isinstance(args[0], Tensor):
        rows = sum(args[0].shape[:1])  # the number is not a tensor
    else:
        rows = next((x for x in args if type(x) is int), -1)
    key: list[Any] = [group_rows(rows)]
    for x in args:
        if isinstance(x, Tensor):
            size: Any = x.shape
            if x.ndim == 2 and size[0] == rows:
                size = "rows", size[1]
            key += (size, x.stride(), x.dtype, x.data_ptr() & 15, x.device, x.is_neg())
        elif type(x) is int and x == rows:
            key.append("rows")
        else:
            key.append(key_of((x,)))
    return tuple(key)


class Decisions(Generic[Result]):
    """Decisions by their keys, at most ``MAX_KEYS`` of them."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[Hashable, Result] = {}

    def get(self, key: Hashable) -> Result | None:
        """Return the decision for this key, if there is one."""
        return self._found.get((key, _environment.get(_VARIABLE)))

    def put(self, key: Hashable, decision: Result) -> Result:
        """Store a decision and return it; a full table drops the oldest one."""
        while len(self._found) >= MAX_KEYS:
            self._found.pop(next(iter(tuple(self._found)), None), None)
        self._found[key, _environment.get(_VARIABLE)] = decision
        return decision

    def forget(self) -> None:
        """Forget all decisions."""
        self._found.clear()

    def __len__(self) -> int:
        return len(self._found)


class _PlainTable:
    """A replacement of ``player.cpp``'s ``Table`` without repetition, for example on a CPU."""

    __slots__ = ("_decisions", "_miss")

    def __init__(self, miss: Callable[..., Any]) -> None:
        self._miss, self._decisions = miss, Decisions[Callable[..., Any]]()

    def __call__(self, *args: Any) -> Any:
        return (self._decisions.get(key_of(args)) or self._miss)(*args)

    def put(self, args: tuple[Any, ...], function: Callable[..., Any]) -> None:
        self._decisions.put(key_of(args), function)

    def forget(self) -> None:
        self._decisions.forget()

    def __len__(self) -> int:
        return len(self._decisions)


class Recorded:
    """A function that only allocates and launches kernels, so that its calls can be repeated."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        """Run the function."""
        return self.function(*args)


class Specialized:
    """A function that is decided once for each kind of arguments.

    Args:
        decide: takes the arguments of a call, returns the function that runs calls of its kind. An
            exception reaches the caller, and nothing is remembered. The first call of a function
            that is :class:`Recorded` is recorded, and later ones repeat it.
        dispatch: called instead if the first argument must go through the dispatcher.
        with_rows: the places of arguments that may have other numbers of rows in calls of one kind,
            if these round up to the same multiple of ``ROW_STEP``.

    Decisions may depend on :func:`key_of` the arguments and on ``BLOCKTENSOR_GEMM``.

    Threads may share one: if two see a new kind together, both decide, and either result is valid.
    """

    __slots__ = ("_decide", "_dispatch", "_table", "_with_rows")

    def __init__(
        self, decide: Callable[..., Any], dispatch: Any = None, with_rows: tuple[int, ...] = ()
    ) -> None:
        self._decide, self._dispatch = decide, dispatch
        self._with_rows = bits_of(with_rows)
        self._table: Any = _PlainTable(self._first)

    def __call__(self, *args: Any) -> Any:
        """Run the function."""
        first = args[0]
        if must_dispatch(first.data if type(first) is Quantized else first):
            if self._dispatch is None or this_thread.launches is not None:
                return self.run(*args)
            return self._dispatch(*args)
        if this_thread.watch is not None or this_thread.launches is not None:
            return self.run(*args)
        return self._table(*args)

    def run(self, *args: Any) -> Any:
        """Run the function outside of the dispatcher; do not repeat while a call is recorded."""
        if this_thread.watch is not None:
            with watching(None) as watch:  # do not watch the ops that this op runs
                watch(self, args)
                return self.run(*args)
        if this_thread.launches is not None:
            return self._decide(*args)(*args)
        return self._table(*args)

    def _first(self, *args: Any) -> Any:
        """Decide, run the call, and remember how calls like it run."""
        if any(isinstance(x, Tensor) and x.is_neg() for x in args):
            return self.run(*(x.resolve_neg() if isinstance(x, Tensor) else x for x in args))
        function = self._decide(*args)
        if not isinstance(function, Recorded):
            self._table.put(args, function)
            return function(*args)
        player = build_player.player()
        if player is None:
            self._table.put(args, function.function)
            return function(*args)
        table = self.table_of(player)
        from .record import record  # this import needs Triton

        result, recording = record(function.function, args, player, self._with_rows)
        if check_recordings.ENABLED and isinstance(recording, player.Recording):
            recording = check_recordings.checked(function.function, recording)
        if isinstance(recording, player.Recording):
            table.put(args, function.function, recording)
        elif recording is not None:
            table.put(args, recording)
        return result

    def table_of(self, player: Any) -> Any:
        """Return the ``Table`` of ``player.cpp`` that runs calls which need no dispatcher."""
        if isinstance(self._table, _PlainTable):
            self._table = player.Table(self._first, MAX_KEYS, self._with_rows)
        return self._table

    def recording(self, args: tuple[Any, ...]) -> Any:
        """Return the ``Recording`` that calls like this one repeat; None if there is none."""
        return None if isinstance(self._table, _PlainTable) else self._table.recording(args)

    def forget(self) -> None:
        """Forget all decisions."""
        self._table.forget()

    def __len__(self) -> int:
        return len(self._table)


@contextmanager
def watching(watch: Callable[..., None] | None) -> Iterator[Any]:
    """Call ``watch`` with every op that this thread computes, and its arguments, before it runs.

    Matmuls run op by op meanwhile. Yield the previous function.
    """
    outer, this_thread.watch = this_thread.watch, watch
    try:
        yield outer
    finally:
        this_thread.watch = outer


class Sequence:
    """A function that calls several ops, recorded once for each kind of arguments.

    The kind of a call is the :func:`key_of` all arguments, but for the number of rows of some (see
    :class:`Specialized`). The other arguments, with the shapes that a plan stands for, then say all
    other sizes. While ops are watched or must go through the dispatcher, the function itself runs.

    Attributes:
        table: the function's recordings.
    """

    def __init__(self, function: Callable[..., Any], with_rows: tuple[int, ...] = ()) -> None:
        self._function = function
        self.table = Specialized(lambda *args: recorded(function), function, with_rows)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        """Run the function."""
        return (self.table if this_thread.watch is None else self._function)(*args)


SEQUENCES: list[Sequence] = []
"""All sequences."""


def sequence(*with_rows: int) -> Callable[[Callable[..., Any]], Sequence]:
    """Decorate a function that calls several ops: see :class:`Sequence`.

    ``with_rows``: the places of arguments that have the number of rows of a call.
    """

    def decorate(function: Callable[..., Any]) -> Sequence:
        SEQUENCES.append(Sequence(function, with_rows))
        return SEQUENCES[-1]

    return decorate


def bits_of(places: tuple[int, ...]) -> int:
    """Return a number that has a bit for each of these places."""
    return sum(1 << place for place in places)


def recorded(function: Callable[..., Any], launches: bool = True) -> Callable[..., Any]:
    """Record the launches of ``function`` once for calls of one kind, then repeat them.

    Return ``function`` itself unless it only allocates and ``launches`` Triton kernels
    (``record.py``).
    """
    if not launches or this_thread.launches is not None or not has_triton():
        return function  # this call may be a part of a recorded one
    return Recorded(function)
