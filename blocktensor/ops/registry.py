"""Backends as data: which implementation runs an op, and why.

Each family of ops has an ordered registry, best first, whose last entry is the reference:
``cast/choose_backend.py`` and ``gemm/choose_backend.py``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch

Problem = TypeVar("Problem")
Kernels = TypeVar("Kernels")


def no_objection(_: object) -> None:
    """The answer of a backend that takes everything."""
    return None


class NotCompiled(Exception):
    """Raised for a kernel that the installed Triton cannot compile for this GPU.

    Attributes:
        backend: whose kernel it is; None until :func:`loaded` says so.
    """

    backend: Backend[Any, Any] | None = None


def last_line(error: BaseException) -> str:
    """Return the last line of the message of the first error in a chain of causes."""
    while error.__cause__ is not None:  # Triton wraps one for every function that it compiles
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


@dataclass(frozen=True, eq=False)
class Backend(Generic[Problem, Kernels]):
    """One entry of a registry.

    ``unusable(device)``, ``declines(problem)`` and ``yields(problem)`` return the reason, or None;
    the latter two may assume a usable device. A backend that declines cannot run the problem; one
    that yields could, but the next is better. Callers ask :meth:`why_not` about a device.

    Attributes:
        name: how messages and ``BLOCKTENSOR_GEMM`` refer to it.
        load: imports and returns its functions.
        why: the reason for choosing it.
    """

    name: str
    load: Callable[[], Kernels]
    unusable: Callable[[torch.device], str | None] = no_objection
    declines: Callable[[Problem], str | None] = no_objection
    yields: Callable[[Problem], str | None] = no_objection
    why: Callable[[Problem], str] = lambda _: "takes this problem"

    def why_not(self, device: torch.device) -> str | None:
        """Return the reason why the backend cannot run on ``device``; None if it can."""
        return _given_up.get(self) or self.unusable(device)


_given_up: dict[Backend[Any, Any], str] = {}
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


@functools.cache
def loaded(backend: Backend[Any, Kernels]) -> Kernels:
    """Import the functions of a backend once; a :class:`NotCompiled` that they raise names it."""
    kernels: Any = backend.load()
    named = {}
    for field in fields(kernels) if kernels.launches else ():
        function = getattr(kernels, field.name)
        if callable(function):
            named[field.name] = _naming(backend, function)
    return replace(kernels, **named)


def _naming(backend: Backend[Any, Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except NotCompiled as failure:
            failure.backend = backend
            raise

    return run


@dataclass(frozen=True)
class Choice(Generic[Problem, Kernels]):
    """The backend for a problem.

    Attributes:
        backend: the backend.
        why: the reason for choosing it.
        others: why better ones were passed over.
    """

    backend: Backend[Problem, Kernels]
    why: str
    others: str = ""

    @property
    def name(self) -> str:
        """Name of the backend."""
        return self.backend.name

    @property
    def reason(self) -> str:
        """Both reasons."""
        return f"{self.why}; {self.others}" if self.others else self.why


def first_choice(
    backends: Iterable[Backend[Problem, Kernels]], problem: Problem, device: torch.device
) -> Choice[Problem, Kernels]:
    """The first backend that takes ``problem``; one of ``backends`` must take it."""
    passed_over: dict[str, list[str]] = {}  # reason: names
    for backend in backends:
        reason = backend.why_not(device) or backend.declines(problem) or backend.yields(problem)
        if reason is None:
            break
        passed_over.setdefault(reason, []).append(backend.name)
    others = [f"{', '.join(names)}: {reason}" for reason, names in passed_over.items()]
    return Choice(backend, backend.why(problem), "; ".join(others))
