"""One cast of an input for several linears, while the module that calls them runs.

``linear`` and ``grouped_linear`` ask the run that is the innermost of their thread. Each has its
own edge to the input in the autograd graph, so gradients are summed where they would be without
sharing. Nothing is shared outside of a run, while a compiler traces, under dispatch modes, or if
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
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from .plan import Plan

AnyPlan = TypeVar("AnyPlan", bound=Plan)
"""The plan of a linear or of a grouped linear."""


class _Thread(threading.local):
    """State of the calling thread; the class holds the initial value."""

    running: Run | None = None


this_thread = _Thread()


class SharedCasts:
    """Share the casts of inputs of linears in each run, between :meth:`begin` and :meth:`end`.

    Whole runs tell how many linears get each input, the most of all runs. From the next run on,
    forms are dropped after their last use, and an input of one linear is left to it.

    Attributes:
        casts: inputs cast so far, by all threads.
        saved: casts that sharing made unnecessary so far.
        expected: the number of linears that got each input, in order.
    """

    def __init__(self) -> None:
        self.casts = self.saved = 0
        self.expected: tuple[int, ...] = ()

    def begin(self) -> None:
        """Share casts in this thread from now on."""
        this_thread.running = Run(self, this_thread.running)

    def end(self, whole: bool) -> list[list[int]]:
        """Return to what ran before.

        Args:
            whole: whether no exception ended the run, whose inputs are expected from now on.

        Returns:
            Of each input, the ids of the weights that it met; empty if the inputs were expected.
        """
        run = this_thread.running
        while run is not None and run.shared is not self:  # an exception may have left it there
            run = run.outer
        if run is None:  # begin was not reached
            return []
        this_thread.running = run.outer
        counts = map(len, run.users)
        most = tuple(map(max, zip_longest(counts, self.expected, fillvalue=0)))
        if not whole or most == self.expected:
            return []
        self.expected = most
        return run.users


class _Latest(weakref.ref[Tensor]):
    """The latest input, and its forms until it is freed: its id may then be another's."""

    __slots__ = ("forms", "key")

    forms: tuple[Tensor, ...]
    key: Hashable

    def drop(self) -> None:
        """Drop the forms."""
        self.forms, self.key = (), None


class Run:
    """One run of a :class:`SharedCasts`, and the forms of its latest input.

    Attributes:
        shared: what runs.
        outer: the run around this one.
        users: of each input so far, the ids of the weights that it met.
    """

    def __init__(self, shared: SharedCasts, outer: Run | None) -> None:
        self.shared, self.outer = shared, outer
        self.users: list[list[int]] = []
        self._latest: _Latest | None = None

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
        if not plan.serves_all or x.is_inference():
            return ()  # changes of inference tensors are not counted
        held: Any = x.rowwise_data if isinstance(x, BlockwiseFP8Tensor) else x  # has memory
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
        latest, shared = self._latest, self.shared
        if latest is None or latest.key != key:
            latest = self._latest = _Latest(whole, _Latest.drop)
            latest.key, latest.forms = key, ()
            self.users.append([])
        users = self.users[-1]
        users.append(id(w))
        expected = next(iter(shared.expected[len(self.users) - 1 :]), 0)
        forms = latest.forms
        if len(forms) >= (2 if plan.x_columnwise is None else 4):
            shared.saved += 1
        else:
            shared.casts += 1
            if expected == len(users) == 1:
                return ()
            made = x.detach()
            forms = cast(plan, made.to(plan.out_dtype) if plan.casts_x else made)
        latest.forms = () if len(users) == expected else forms
        return forms
