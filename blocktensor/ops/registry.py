"""Describe backends as data: which implementation runs an op, and why.

Each family of ops has a table of backends, best first, which ends with the reference; for example
``CAST_BACKENDS`` in ``cast/choose_backend.py``. For every op of its family, a backend has a
function of the same name and signature in one of its modules, which are imported at the first use:
some need Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

Problem = TypeVar("Problem")


def no_objection(_: object) -> None:
    """Return None: the backend takes every device and problem."""
    return None


def last_line(error: BaseException) -> str:
    """Return the last line of the message of the root cause of an error."""
    while error.__cause__ is not None:  # Triton adds one error for every function that it compiles
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


@dataclass(frozen=True, eq=False)
class Backend(Generic[Problem]):
    """A backend of one family of ops.

    ``unusable(device)``, ``declines(problem)`` and ``yields(problem)`` return a reason or None; the
    latter two are called for usable devices only. A backend that declines cannot run the problem; a
    backend that yields could run it, but the next one is faster.

    Attributes:
        name: its name in messages and in ``BLOCKTENSOR_GEMM``.
        modules: imports and returns the modules (or other objects) that have its functions; the
            first one with a function of an op's name is used.
        why: the reason for choosing it.
        launches: True if its functions only allocate and launch kernels, so that calls can be
            recorded.
    """

    name: str
    modules: Callable[[], tuple[Any, ...]]
    unusable: Callable[[torch.device], str | None] = no_objection
    declines: Callable[[Problem], str | None] = no_objection
    yields: Callable[[Problem], str | None] = no_objection
    why: Callable[[Problem], str] = lambda _: "takes this problem"
    launches: bool = True

    def function(self, name: str) -> Callable[..., Any] | None:
        """Return the function of this name; None if it has none."""
        for module in self.modules():
            if (found := getattr(module, name, None)) is not None:
                made: Callable[..., Any] = found
                return made
        return None


@dataclass(frozen=True)
class Choice(Generic[Problem]):
    """The backend for a problem.

    Attributes:
        backend: the backend.
        why: the reason for choosing it.
        others: why better backends were not chosen.
    """

    backend: Backend[Problem]
    why: str
    others: str = ""

    @property
    def name(self) -> str:
        """Return the name of the backend."""
        return self.backend.name

    @property
    def reason(self) -> str:
        """Return why it was chosen, and why others were not."""
        return f"{self.why}; {self.others}" if self.others else self.why


def first_choice(
    backends: Iterable[Backend[Problem]], problem: Problem, device: torch.device
) -> Choice[Problem]:
    """Return the first backend that takes ``problem``; at least one must take it."""
    passed_over: dict[str, list[str]] = {}  # the names of backends by reason
    for backend in backends:
        reason = backend.unusable(device) or backend.declines(problem) or backend.yields(problem)
        if reason is None:
            break
        passed_over.setdefault(reason, []).append(backend.name)
    others = [f"{', '.join(names)}: {reason}" for reason, names in passed_over.items()]
    return Choice(backend, backend.why(problem), "; ".join(others))
