"""The count of a sharded weight's changes, alike on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from ...tensor.base import MasterBase
from ..dtensor import local_of


class Changes:
    """Counts the changes of a sharded weight that PyTorch counts or that replace its rows.

    Ranks compare their counts with earlier ones, never with those of other ranks, and decide by
    that alike. So what FSDP does on some ranks alone must be left out (:meth:`skip`).
    """

    __slots__ = ("_count", "_seen")

    def __init__(self) -> None:
        self._count = 0
        self._seen: object = None

    def count(self, weight: Tensor | None) -> int:
        """The number of changes up to now, of a weight whose present DTensor is given."""
        state = _state_of(weight)
        if state != self._seen:
            self._count, self._seen = self._count + 1, state
        return self._count

    def skip(self, weight: Tensor | None) -> None:
        """What has happened since :meth:`count` was no change."""
        self._seen = _state_of(weight)


def _state_of(weight: Tensor | None) -> object:
    """A value that differs after a change."""
    local = local_of(weight)
    if weight is None or not isinstance(local, MasterBase):
        return None
    master = local.master
    with torch._C.DisableTorchFunctionSubclass():  # for host time: a microsecond a counter
        if weight.is_inference():
            return object()  # PyTorch counts nothing: it may have changed
        # a view shares the version counter of its base: the parameter, its to_local(), or the
        # master that torch.distributed.checkpoint writes to
        counters = [x._version for x in (weight, local, master) if not x.is_inference()]
    # counters of other objects begin again at 0
    return counters, WeakIdRef(local), WeakIdRef(master), master.data_ptr(), master.device
