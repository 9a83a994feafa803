"""Backends as data: which implementation runs an op, and why.

Each family of ops has a table of backends, best first, whose last entry is the reference (for one,
``CAST_BACKENDS`` in ``cast/choose_backend.py``). A backend has a function of the name and with the
signature of every op of its family, in one of its modules.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

Problem = TypeVar("Problem")


def no_objection(_: object) -> None:
    """Return the answer of a backend that takes everything."""
    return None


def last_line(error: BaseException) -> str:
    """Return the last line of the message of the first error in a chain of causes."""
    while error.__cause__ is not None:  # Triton wraps one for every function that it compiles
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


@dataclass(frozen=True, eq=False)
class Backend(Generic[Problem]):
    """One entry of a table.

    ``unusable(device)``, ``declines(problem)`` and ``yields(problem)`` return the reason, or None;
    the latter two may assume a usable device. A backend that declines cannot run the problem; one
    that yields could, but the next is better.

    Attributes:
        name: how messages and ``BLOCKTENSOR_GEMM`` refer to it.
        modules: what holds its functions, the first that has one: names of modules (or
            ``module:object``) below ``blocktensor.ops``, imported at the first use.
        why: the reason for choosing it.
        launches: True if its functions only allocate and launch kernels: calls can be recorded.
    """

    name: str
    modules: tuple[Any, ...]
    unusable: Callable[[torch.device], str | None] = no_objection
    declines: Callable[[Problem], str | None] = no_objection
    yields: Callable[[Problem], str | None] = no_objection
    why: Callable[[Problem], str] = lambda _: "takes this problem"
    launches: bool = True

    def function(self, name: str) -> Callable[..., Any] | None:
        """Return the function of this name; None if it has none."""
        for module in self.modules:
            if isinstance(module, str):
                module, _, part = module.partition(":")
                module = pkgutil.resolve_name(f"{__package__}.{module}:{part}")
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
        others: why better ones were passed over.
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
        """Say why it was chosen, and why others were not."""
        return f"{self.why}; {self.others}" if self.others else self.why


def first_choice(
    backends: Iterable[Backend[Problem]], problem: Problem, device: torch.device
) -> Choice[Problem]:
    """Return the first backend that takes ``problem``; one of ``backends`` must take it."""
    passed_over: dict[str, list[str]] = {}  # reason: names
    for backend in backends:
        reason = backend.unusable(device) or backend.declines(problem) or backend.yields(problem)
        if reason is None:
            break
        passed_over.setdefault(reason, []).append(backend.name)
    others = [f"{', '.join(names)}: {reason}" for reason, names in passed_over.items()]
    return Choice(backend, backend.why(problem), "; ".join(others))
