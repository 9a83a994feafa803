"""Backends as data: which implementation runs an op, and why.

Each family of ops has a table of backends, best first, whose last entry is the reference (for one,
``CAST_BACKENDS`` in ``cast/choose_backend.py``). A backend has a function of the name and with the
signature of every op of its family, in one of its modules.
"""

from __future__ import annotations

import functools
import pkgutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

Problem = TypeVar("Problem")


def no_objection(_: object) -> None:
    """Return the answer of a backend that takes everything."""
    return None


class NotCompiled(Exception):
    """Raised for a kernel that the installed Triton cannot compile for this GPU.

    Attributes:
        backend: whose kernel it is; None until a function of :meth:`Backend.function` says so.
    """

    backend: Backend[Any] | None = None


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
    that yields could, but the next is better. Callers ask :meth:`why_not` about a device.

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

    def why_not(self, device: torch.device) -> str | None:
        """Return the reason why the backend cannot run on ``device``; None if it can."""
        return _given_up.get(self) or self.unusable(device)

    def function(self, name: str) -> Callable[..., Any] | None:
        """Return the function of this name; a :class:`NotCompiled` that it raises names it."""
        for module in self.modules:
            if isinstance(module, str):
                module, _, part = module.partition(":")
                module = pkgutil.resolve_name(f"{__package__}.{module}:{part}")
            if (found := getattr(module, name, None)) is not None:
                return _naming(self, found) if self.launches else found
        return None


_given_up: dict[Backend[Any], str] = {}
"""Backends that are no longer chosen, since a kernel did not compile, each with the reason."""


def give_up(failure: NotCompiled) -> None:
    """Stop choosing the backend whose kernel does not compile, and warn once.

    Raises:
        NotCompiled: ``failure``, if its kernel belongs to no backend.
    """
    backend = failure.backend
    if backend is None:
        raise failure
    if backend not in _given_up:
        _given_up[backend] = str(failure)
        warnings.warn(
            f"blocktensor: {failure}. The next backend runs from now on: the results are as exact, "
            f"the speed is lower. `python -m blocktensor` lists the backends",
            stacklevel=2,
        )


def _naming(backend: Backend[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except NotCompiled as failure:
            failure.backend = backend
            raise

    return run


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
        reason = backend.why_not(device) or backend.declines(problem) or backend.yields(problem)
        if reason is None:
            break
        passed_over.setdefault(reason, []).append(backend.name)
    others = [f"{', '.join(names)}: {reason}" for reason, names in passed_over.items()]
    return Choice(backend, backend.why(problem), "; ".join(others))
