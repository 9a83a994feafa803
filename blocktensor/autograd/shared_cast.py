"""One cast of an input for several linears, while the module that calls them runs.

``linear`` and ``grouped_linear`` ask the casts that are running in their thread. Each has its own
edge to the input in the autograd graph, so gradients are summed where they would be without
sharing. Nothing is shared while no casts run, while a compiler traces, under dispatch modes, or if
the input or ``offs`` was changed in between.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..ops.runtime.specialize import must_dispatch
from .plan import Plan, inner

AnyPlan = TypeVar("AnyPlan", bound=Plan)
"""The plan of a linear or of a grouped linear."""


class _Thread(threading.local):
    """State of the calling thread; the class holds the initial value."""

    running: SharedCasts | None = None


this_thread = _Thread()


class _Latest(weakref.ref[Tensor]):
    """The latest input, and its forms until it is freed: its id may then be another's."""

    __slots__ = ("forms", "key")

    forms: tuple[Tensor, ...]
    key: Hashable

    def drop(self) -> None:
        """Drop the forms."""
        self.forms, self.key = (), None


class _Run(threading.local):
    """State of one :class:`SharedCasts` in the calling thread.

    Attributes:
        latest: the latest input.
        users: of each input of this run so far, the ids of the weights that it met.
        outer: what was running before, once for each entry.
    """

    def __init__(self) -> None:
        self.latest: _Latest | None = None
        self.users: list[list[int]] = []
        self.outer: list[SharedCasts | None] = []


class SharedCasts:
    """The forms of the latest input of linears, between :meth:`begin` and :meth:`end`.

    Whole runs tell how many linears get each input, the most of all runs. From the next run on,
    forms are dropped after their last use, and an input of one linear is left to it.

    Attributes:
        casts: inputs cast so far.
        saved: casts that sharing made unnecessary so far.
        expected: the number of linears that got each input, in order.
    """

    def __init__(self) -> None:
        self.casts = self.saved = 0
        self.expected: tuple[int, ...] = ()
        self._run = _Run()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _run=_Run())

    def begin(self) -> None:
        """Share casts in this thread from now on."""
        run = self._run
        run.outer.append(this_thread.running)
        run.latest, run.users = None, []
        this_thread.running = self

    def end(self, whole: bool) -> list[list[int]]:
        """Return to what was shared before.

        Args:
            whole: whether no exception ended the run, whose inputs are expected from now on.

        Returns:
            Of each input, the ids of the weights that it met; empty if the inputs were expected.
        """
        run, met = self._run, []
        if run.outer:  # else begin was not reached
            this_thread.running = run.outer.pop()
            counts = map(len, run.users)
            most = tuple(map(max, zip_longest(counts, self.expected, fillvalue=0)))
            if whole and most != self.expected:
                self.expected, met = most, run.users
            run.latest, run.users = None, []
        return met

    def forms_of(
        self,
        x: Tensor,
        w: Tensor,
        offs: Tensor | None,
        plan: AnyPlan,
        cast: Callable[[AnyPlan, Tensor], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Return data and scales of the forms of ``x``, cast now or for another linear.

        Args:
            x: the input.
            w: the weight that it meets.
            offs: the ends of the groups of a grouped linear.
            plan: of the linear.
            cast: given the plan, and the input in the dtype that is cast.

        Returns:
            Nothing if the linear is to cast the input.
        """
        held = inner(x)  # what has memory
        if plan.tracing or must_dispatch(held) or x.is_inference():
            return ()  # changes of inference tensors are not counted
        if offs is not None and (must_dispatch(offs) or offs.is_inference()):
            return ()
        stream: Any = torch.cuda.current_stream(x.device) if x.is_cuda else None
        whole = x if x._base is None else x._base  # views count changes together
        key = (
            id(whole), x._version, held.data_ptr(), x.shape[-1:], x.numel(),
            None if x.is_contiguous() else (x.shape, x.stride()),
            plan.casts_x and plan.out_dtype, plan.format, plan.wgrad_input,
            None if offs is None else (id(offs), offs._version, offs.data_ptr()), stream,
        )  # fmt: skip
        run = self._run
        latest = run.latest
        if latest is None or latest.key != key:
            latest = run.latest = _Latest(whole, _Latest.drop)
            latest.key, latest.forms = key, ()
            run.users.append([])
        users = run.users[-1]
        users.append(id(w))
        place = len(run.users) - 1
        expected = self.expected[place] if place < len(self.expected) else 0
        forms = latest.forms
        if len(forms) >= (2 if plan.x_columnwise is None else 4):
            self.saved += 1
        else:
            self.casts += 1
            if expected == len(users) == 1:
                return ()
            made = x.detach()
            forms = cast(plan, made.to(plan.out_dtype) if plan.casts_x else made)
        latest.forms = () if len(users) == expected else forms
        return forms
