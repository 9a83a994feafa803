"""One cast of an input for several linear layers, while the module that calls them runs.

``linear`` and ``grouped_linear`` ask the innermost run of their thread. Each keeps its own edge to
the input in the autograd graph, so gradients are summed in the same order as without sharing.
Nothing is shared outside of a run, while a compiler traces, under dispatch modes, or if the input
or ``offs`` got other memory or was changed in a way that PyTorch counts. Weights, whose writes
PyTorch does not count either, are cast in every forward; an input is shared only until the forward
of the module ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import TypeVar

from torch import Tensor

from ..ops.runtime.launch import current_stream
from ..ops.runtime.specialize import must_dispatch
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.torch_internals.callers import Caller
from .around_forward import was_interrupted
from .plan import Plan

AnyPlan = TypeVar("AnyPlan", bound=Plan)
"""The plan of a linear layer or of a grouped linear layer."""


class _Thread(threading.local):
    """State of the calling thread; the class holds the initial value."""

    running: Run | None = None


this_thread = _Thread()


class SharedCasts:
    """Share casts of the inputs of linear layers between :meth:`begin` and :meth:`end`.

    A run keeps the forms of its latest input.

    Attributes:
        casts: inputs cast so far, by all threads.
        saved: casts that sharing has saved so far.
    """

    def __init__(self) -> None:
        self.casts = self.saved = 0

    def begin(self, forward: Caller | None = None) -> None:
        """Share casts in this thread from now on, while ``forward`` runs."""
        outer = this_thread.running
        while outer is not None and was_interrupted(outer.forward):
            outer = outer.outer
        this_thread.running = Run(self, outer, forward)

    def end(self) -> None:
        """Stop sharing, and go on with the run around this one, if there is one."""
        run = this_thread.running
        while run is not None and run.shared is not self:  # an exception may have left a run there
            run = run.outer
        if run is not None:  # else begin was not called
            this_thread.running = run.outer


class _Latest(weakref.ref[Tensor]):
    """The latest input and its forms, which are dropped when it is freed: ids are reused.

    Attributes:
        memory: an alias of the input, which keeps its old memory after ``x.data = ...``: else new
            memory could get the same address.
    """

    __slots__ = ("forms", "key", "memory")

    forms: tuple[Tensor, ...]
    key: Hashable
    memory: Tensor | None

    def drop(self) -> None:
        """Drop the forms."""
        self.forms, self.key, self.memory = (), None, None


class Run:
    """One run of a module whose linear layers share casts, and the forms of its latest input.

    Attributes:
        shared: the shared casts of the module.
        outer: the run around this one.
        forward: the function that runs the module's forward, which ends the run.
    """

    def __init__(
        self, shared: SharedCasts, outer: Run | None, forward: Caller | None = None
    ) -> None:
        self.shared, self.outer, self.forward = shared, outer, forward
        self._latest: _Latest | None = None

    def forms_of(
        self,
        x: Tensor,
        offs: Tensor | None,
        plan: AnyPlan,
        cast: Callable[[AnyPlan, Tensor], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Return data and scales of the forms of ``x``, cast now or for another linear.

        Args:
            x: the input, in high precision, or in FP8 if its columnwise form is derived.
            offs: the ends of the groups of a grouped linear layer.
            plan: of the linear layer.
            cast: given the plan, and the input in the dtype that is cast, or in FP8.

        Returns:
            Nothing if the linear layer must cast the input itself.
        """
        memory = x
        if isinstance(x, BlockwiseFP8Tensor):
            assert x.rowwise_data is not None
            memory = x.rowwise_data
        if not plan.is_cached or memory.is_inference() or memory.is_neg():
            return ()  # changes of inference tensors are not counted, and keys have no signs
        if offs is not None and (must_dispatch(offs) or offs.is_inference()):
            return ()
        stream = current_stream(memory.get_device()) if memory.is_cuda else None
        whole = memory if memory._base is None else memory._base  # views count changes together
        key = (
            id(whole),
            memory._version,
            memory.data_ptr(),
            memory.shape[-1:],
            memory.numel(),
            None if memory.is_contiguous() else (memory.shape, memory.stride()),
            plan.casts_x and plan.out_dtype,
            plan.format,
            plan.wgrad_input,
            None if offs is None else (id(offs), offs._version, offs.data_ptr()),
            stream,
        )
        latest = self._latest
        if latest is None or latest.key != key:
            latest = self._latest = _Latest(whole, _Latest.drop)
            latest.key, latest.forms, latest.memory = key, (), memory.detach()
        if len(latest.forms) >= (2 if plan.x_columnwise is None else 4):
            if was_interrupted(self.forward):
                this_thread.running = self.outer
                return ()
            self.shared.saved += 1
        else:
            self.shared.casts += 1
            latest.forms = cast(plan, x if x is not memory else x.detach().to(plan.out_dtype))
        return latest.forms
