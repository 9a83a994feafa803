"""Backends as data: which implementation runs an op, and why.

Each family of ops has an ordered registry, best first, whose last entry is the reference:
``cast/choose_backend.py`` and ``gemm/choose_backend.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Problem = TypeVar("Problem")
Kernels = TypeVar("Kernels")


def no_objection(_: object) -> None:
    """The answer of a backend that takes everything."""
    return None


@dataclass(frozen=True)
class Backend(Generic[Problem, Kernels]):
    """One entry of a registry.

    ``unusable(device)``, ``declines(problem)`` and ``yields(problem)`` return the reason, or None;
    the latter two may assume a usable device. A backend that declines cannot run the problem; one
    that yields could, but the next is better.

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
        reason = backend.unusable(device) or backend.declines(problem) or backend.yields(problem)
        if reason is None:
            break
        passed_over.setdefault(reason, []).append(backend.name)
    others = [f"{', '.join(names)}: {reason}" for reason, names in passed_over.items()]
    return Choice(backend, backend.why(problem), "; ".join(others))
