"""Know which tensors one operation saves: a saved-tensor hook is called with each alone.

An operation saves its inputs, runs, and saves its results. Some operations read both in backward:
``amax`` looks for the elements of its input that equal the result. A rounded input has none, and
its gradient would be NaN or zero. So where an operation saves inputs and a result, all are kept.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .packed import MemoryRows, Packed, SavedTensor
from .saved_report import SavedReport

COMPARED = "compared with a result"


class _Input(NamedTuple):
    """An input that was packed.

    Attributes:
        saved, tensor: refer to what autograd holds, and to the tensor.
        rows: of the tensor.
        report: has counted it.
    """

    saved: weakref.ref[SavedTensor]
    tensor: weakref.ref[Tensor]
    rows: MemoryRows
    report: SavedReport

    def keep(self) -> None:
        """Keep the tensor in place of its cast."""
        saved, x = self.saved(), self.tensor()  # an operation holds its inputs while it runs
        if saved is None or x is None or not isinstance(saved.saved, Packed):
            return
        packed, nbytes = weakref.ref(saved.saved), saved.saved.nbytes
        saved.keep(x)
        if packed() is None:  # no other operation has saved it
            self.report.uncount_packed(x, self.rows, nbytes)
        self.report.count_kept(x, COMPARED)


class Operation:
    """The operation that runs in a thread, and which inputs it has saved.

    Attributes:
        number: of the next node of this thread. The node of the operation has the number before,
            since it is made before the operation saves anything.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._has_inputs = False
        self._packed: list[_Input] = []

    def has_made(self, x: Tensor) -> bool:
        """Return True for a result with a gradient."""
        node = x.grad_fn
        return node is not None and node._sequence_nr() == self.number - 1

    def keeps(self, x: Tensor) -> bool:
        """Return True if ``x`` is a result of an operation that has saved inputs; keep these.

        Results without gradients are statistics, such as the mean of a norm, and do not count.
        """
        if not self.has_made(x):
            self._has_inputs = True
            return False
        for each in self._packed:
            each.keep()
        return self._has_inputs

    def has_packed(
        self, x: Tensor, rows: MemoryRows, saved: SavedTensor, report: SavedReport
    ) -> None:
        """Note that ``x`` was packed, and counted by ``report``."""
        self._packed.append(_Input(weakref.ref(saved), weakref.ref(x), rows, report))


class _Thread(threading.local):
    """State of the calling thread."""

    def __init__(self) -> None:
        self.latest = Operation(0)


_this_thread = _Thread()


_next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def running_operation() -> Operation:
    """Return the operation of this thread that saves a tensor now."""
    number = _next_number()
    if _this_thread.latest.number != number:
        _this_thread.latest = Operation(number)
    return _this_thread.latest
