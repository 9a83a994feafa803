"""Know the memory of weights in a run: their own, and that of copies and dequantized values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ..ops.checks import HIGH_PRECISION
from ..sharding.dtensor import local_of
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight

_COPIES = (torch.ops.aten.clone, torch.ops.aten._to_copy, torch.ops.blocktensor.dequantize)


class _Part(NamedTuple):
    """Bytes ``start`` to ``end`` of a storage, which are a weight's.

    Attributes:
        of: name of an FP8 weight; empty for a plain parameter or buffer.
        what: what they are of it: its master, or the op that copied it.
        storage: kept so that no other storage is found at its address.
    """

    start: int
    end: int
    of: str
    what: str
    storage: Any


class WeightMemory:
    """The memory of a model's weights, of their copies and of dequantized values."""

    def __init__(self, model: nn.Module) -> None:
        self._parts: dict[int, list[_Part]] = defaultdict(list)
        for name, held in chain(model.named_parameters(), model.named_buffers()):
            local = local_of(held)
            held = held if local is None else local
            if type(held) in (nn.Parameter, Tensor):
                self._remember(held, "")
            self._meet(held, name)

    def meet(self, *operands: Any) -> None:
        """Remember the FP8 weights among the operands of an op; not all are parameters."""
        for x in tree_leaves(operands):
            self._meet(x, "an FP8 weight")

    def follow(self, func: Any, operands: Any, out: Any) -> None:
        """Remember ``out`` if the op copied or dequantized a weight."""
        packet = getattr(func, "overloadpacket", None)
        if packet in _COPIES:
            for part in filter(None, map(self._part, _matrices(operands))):
                self._remember(out, part.of, str(packet))

    def reads_weight(self, operands: Any) -> bool:
        """Return True if an operand is, or is a copy of, any parameter or buffer."""
        return any(map(self._part, _matrices(operands)))

    def misread(self, operands: Any) -> str:
        """Say how a matmul reads an FP8 weight in high precision; return "" if it does not."""
        for x in _matrices(operands):
            part = self._part(x) if x.dtype in HIGH_PRECISION else None
            if part is not None and part.of:
                return f"reads {part.what} of {part.of}"
        return ""

    def _meet(self, x: Any, name: str) -> None:
        parts: tuple[Tensor | None, ...] = ()
        if isinstance(x, BlockwiseFP8Weight):
            parts = (x._cast_from,)
        elif isinstance(x, BlockwiseFP8Tensor) and x.format.transposes:
            parts = x.rowwise_data, x.columnwise_data
        for part in parts:
            if part is not None:
                self._remember(part, name)

    def _remember(self, x: Tensor, of: str, what: str = "the master") -> None:
        known = self._part(x)
        if known is None or not known.of:
            storage = x.untyped_storage()
            part = _Part(*_extent(x), of, what, StorageWeakRef(storage))
            self._parts[storage._cdata].append(part)

    def _part(self, x: Tensor) -> _Part | None:
        """Return the part of a weight that overlaps with ``x``; of several, an FP8 weight."""
        start, end = _extent(x)
        known = self._parts.get(x.untyped_storage()._cdata, ())
        overlapping = (part for part in known if start < part.end and part.start < end)
        return max(overlapping, key=lambda part: part.of, default=None)


def _matrices(operands: Any) -> Iterator[Tensor]:
    """Return the operands of two dimensions or more that have memory to compare."""
    for x in tree_leaves(operands):
        if isinstance(x, Tensor) and x.layout is torch.strided and x.ndim > 1:
            yield x


def _extent(x: Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that ``x`` may read, and the first that it does not."""
    start, size = int(x.storage_offset()), x.element_size()
    last = sum(int(n - 1) * int(stride) for n, stride in zip(x.shape, x.stride(), strict=True))
    return start * size, (start + last + 1) * size if x.numel() else start * size
