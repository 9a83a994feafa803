"""Ops that prepare once for each kind of arguments, and from then on only run.

What an op checks and chooses depends on its tensors' shapes, strides, dtypes, alignment and device,
and on arguments that are no tensors: never on values. So it is decided once for each such kind of
call; the next call of the kind costs one look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Run = Callable[..., Any]
"""A prepared op: takes what the op takes."""

MAX_KINDS = 4096
"""Kinds of calls in one table; beyond them, the oldest is prepared anew when it returns."""

Value = TypeVar("Value")


def remember(table: dict[Hashable, Value], kind: Hashable, value: Value) -> Value:
    """Put ``value`` in a table of kinds, which forgets its oldest where it is full."""
    while len(table) >= MAX_KINDS:
        table.pop(next(iter(tuple(table))), None)
    table[kind] = value
    return value


class Prepared:
    """An op as a table of runs, filled on demand.

    Args:
        kind: takes what a call passes and returns, as a hashable value, all that ``prepare`` (and
            the run it returns) may look at.
        prepare: takes what a call passes and returns how to run calls of this kind; what it raises
            reaches the caller, and nothing is remembered.

    Threads may share one: two that meet a new kind together both prepare it, and either will do.
    """

    __slots__ = ("_kind", "_prepare", "_runs")

    def __init__(self, kind: Callable[..., Hashable], prepare: Callable[..., Run]) -> None:
        self._kind, self._prepare = kind, prepare
        self._runs: dict[Hashable, Run] = {}

    def __call__(self, *args: Any) -> Any:
        """Run the op."""
        run = self._runs.get(self._kind(*args))
        return self._first(*args) if run is None else run(*args)

    def _first(self, *args: Any) -> Any:
        run = self._prepare(*args)
        result = run(*args)
        # a run may know better after its first call
        remember(self._runs, self._kind(*args), getattr(run, "settled", None) or run)
        return result

    def run_for(self, *args: Any) -> Run:
        """What runs calls of the kind of ``args``, without a look at their kind once one was."""
        return self._runs.get(self._kind(*args)) or self

    def forget(self) -> None:
        """Prepare every kind of call anew."""
        self._runs.clear()


def prepare(module: Any, name: str, *args: Any) -> Run:
    """How to call ``module.name`` again with arguments of the same kind as ``args``.

    A function with an attribute ``prepare`` is asked; a plain one is looked up at every call.
    """
    own = getattr(getattr(module, name), "prepare", None)
    if own is not None:
        run: Run = own(*args)
        return run
    return lambda *args: getattr(module, name)(*args)
