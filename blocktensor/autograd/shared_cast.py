"""One cast of an input for several grouped linears, while the module that calls them runs.

``grouped_linear`` asks the casts that are running in its thread. Nothing is shared while none are,
while a compiler traces, under dispatch modes, or if the input or ``offs`` was changed in between.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..ops.runtime.specialize import must_dispatch
from .grouped_plan import GroupedPlan
from .linear_plan import inner


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
        users: of each input of this run so far, the number of linears that got it.
        outer: what was running before, once for each entry.
    """

    def __init__(self) -> None:
        self.latest: _Latest | None = None
        self.users: list[int] = []
        self.outer: list[SharedCasts | None] = []


class SharedCasts:
    """The forms of the latest input of grouped linears, between :meth:`begin` and :meth:`end`.

    A whole run tells how many linears get each input. From the next run on, forms are dropped after
    their last use, and an input of one linear is left to it.

    Attributes:
        casts: inputs cast so far.
        saved: casts that sharing made unnecessary so far.
        expected: the number of linears that got each input of the last whole run, in order.
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

    def end(self, whole: bool) -> None:
        """Return to what was shared before; ``whole``: no exception ended the run."""
        run = self._run
        if run.outer:  # else begin was not reached
            this_thread.running = run.outer.pop()
            self.expected = tuple(run.users) if whole else self.expected
            run.latest, run.users = None, []

    def forms_of(
        self,
        x: Tensor,
        offs: Tensor,
        plan: GroupedPlan,
        cast: Callable[[GroupedPlan, Tensor], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Data and scales of the forms of ``x``, made by ``cast`` now or for another linear.

        ``cast`` is given the plan, and the input in the dtype that is cast. Empty if the linear is
        to cast it.
        """
        held = inner(x)  # what has memory
        if plan.tracing or must_dispatch(held) or must_dispatch(offs):
            return ()
        if x.is_inference() or offs.is_inference():  # whose changes in place are not counted
            return ()
        stream: Any = torch.cuda.current_stream(x.device) if x.is_cuda else None
        key = (
            id(x), x._version, held.data_ptr(), x.shape, x.stride(),
            plan.casts_x and plan.out_dtype, plan.format, plan.wgrad_input,
            id(offs), offs._version, offs.data_ptr(), stream,
        )  # fmt: skip
        run = self._run
        latest = run.latest
        if latest is None or latest.key != key:
            latest = run.latest = _Latest(x, _Latest.drop)
            latest.key, latest.forms = key, ()
            run.users.append(0)
        run.users[-1] += 1
        place = len(run.users) - 1
        expected = self.expected[place] if place < len(self.expected) else 0
        forms = latest.forms
        if len(forms) >= (2 if plan.x_columnwise is None else 4):
            self.saved += 1
        else:
            self.casts += 1
            if expected == run.users[-1] == 1:
                return ()
            made = x.detach()
            forms = cast(plan, made.to(plan.out_dtype) if plan.casts_x else made)
        latest.forms = () if run.users[-1] == expected else forms
        return forms
