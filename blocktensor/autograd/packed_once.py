"""One cast for all savers of the same memory."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..ops.runtime.launch import current_stream
from .packed import MemoryRows, Packed


class _Shared(NamedTuple):
    """A cast that later savers of the same memory find.

    Attributes:
        packed: refers to the cast, which graphs hold.
        base: refers to the tensor that counts in-place changes of this memory; the entry ends with
            it.
        storage: keeps the address of the storage from being used again.
    """

    packed: weakref.ref[Packed]
    base: weakref.ref[Tensor]
    storage: StorageWeakRef


_shared: dict[Hashable, _Shared] = {}


def packed_once(x: Tensor, rows: MemoryRows) -> tuple[Packed, bool]:
    """Return the cast of ``x``, and True if it is a new one."""
    base = x if x._base is None else x._base  # all views count changes together
    storage = x.untyped_storage()
    key = (
        id(base),
        storage._cdata,
        x._version,
        x.storage_offset(),
        rows,
        x.dtype,
        current_stream(x.get_device()) if x.is_cuda else None,
    )
    entry = _shared.get(key)
    packed = None if entry is None else entry.packed()
    if packed is not None:
        return packed, False
    packed = Packed(x, rows)
    gone = weakref.ref(base, lambda _: _shared.pop(key, None))
    _shared[key] = _Shared(weakref.ref(packed), gone, StorageWeakRef(storage))
    return packed, True
