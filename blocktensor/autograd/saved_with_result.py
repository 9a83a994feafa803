"""Keep the tensors that an operation compares with its result; a hook sees each saved one alone.

Some operations read their input and their result together in backward: ``amax`` looks for the
elements that equal the result, ``logsumexp`` takes the exponential of the difference. A rounded
input does not fit to the result, and its gradient would be NaN or zero.

An operation saves its inputs, runs, and saves its result, which knows the operation's node. The
node is made before the operation saves anything, and torch numbers the nodes of a thread.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .packed import MemoryRows, Packed, SavedTensor
from .saved_report import SavedReport

COMPARED = "compared with a result"

_MOST_INPUTS = 4096
"""More tensors than any operation saves: ``torch._foreach_norm`` saves the tensors of a list."""

_SAVED = "_raw_saved_"
"""The beginning of the names of those attributes of a node that are saved tensors."""

_NEED_NO_BITS = ("Std", "Pow", "Hypot", "Copysign", "Sgn")
"""Beginnings of the names of nodes that read both, and take rounding as they take other noise."""

_next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class _Input(NamedTuple):
    """A tensor that was packed.

    Attributes:
        number: of the next node when it was saved.
        saved, tensor: refer to what autograd holds, and to the tensor.
        rows: of the tensor.
        report: has counted it.
    """

    number: int
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


class _Thread(threading.local):
    """State of the calling thread.

    Attributes:
        latest: the tensors that were packed last.
        result: the number of the last node whose result was seen.
    """

    def __init__(self) -> None:
        self.latest: deque[_Input] = deque(maxlen=_MOST_INPUTS)
        self.result = -1


_this_thread = _Thread()


def keep_what_it_compares(x: Tensor) -> bool:
    """Return True if ``x`` is the result of an operation that compares inputs with it.

    While the operation saves ``x``, exchange the casts of these inputs for the inputs.
    """
    node = x.grad_fn
    if node is None or not _compares(node):
        return False
    number = node._sequence_nr()
    if number > _this_thread.result:  # else a later operation has saved the result
        _this_thread.result = number
        for each in itertools.takewhile(lambda x: x.number > number, reversed(_this_thread.latest)):
            each.keep()
    return True


def note_packed(x: Tensor, rows: MemoryRows, saved: SavedTensor, report: SavedReport) -> None:
    """Note that ``x`` was packed, and counted by ``report``."""
    made = _Input(_next_number(), weakref.ref(saved), weakref.ref(x), rows, report)
    _this_thread.latest.append(made)


def _compares(node: Any) -> bool:
    kind: type = type(node)
    if not _saves_both(kind):
        return False
    order = getattr(node, "_saved_ord", getattr(node, "_saved_p", None))  # of a norm
    return not (isinstance(order, (int, float)) and math.isfinite(order))


@functools.cache
def _saves_both(node: type) -> bool:
    """Return True for nodes that save an input and the result itself.

    The results of norms that are saved are statistics (``result1``), which need no exact input.
    """
    saved = {name.removeprefix(_SAVED) for name in dir(node) if name.startswith(_SAVED)}
    name = node.__name__
    if name.startswith(_NEED_NO_BITS):
        return False
    return name.startswith("Aminmax") or ("result" in saved and len(saved) > 1)
