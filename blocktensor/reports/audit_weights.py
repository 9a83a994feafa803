"""Follow weights through a run: their memory, parts of it, and values computed from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ..ops.checks import HIGH_PRECISION
from ..sharding.dtensor import local_of
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight

aten = torch.ops.aten


class _Part(NamedTuple):
    """Bytes ``start`` to ``end`` of a storage, which hold ``numel`` values of a weight.

    Attributes:
        of: name of the weight.
        is_fp8: its matmuls should be FP8.
        made_by: the op that computed these bytes from the weight's; empty for its own bytes.
        storage: kept so that no other storage is found at its address.
    """

    start: int
    end: int
    numel: int
    of: str
    is_fp8: bool
    made_by: str
    storage: Any


_COPIES = {
    *(aten._to_copy, aten.clone, aten.copy_, aten.cat, aten.stack),
    *(aten.index, aten.index_select, aten.constant_pad_nd, aten.slice_copy),
}
"""Ops whose result holds values of a weight, of whatever shape."""


class WeightMemory:
    """The memory of a model's weights, and of tensors computed from them while the model runs."""

    def __init__(self, model: nn.Module) -> None:
        self._parts: dict[int, list[_Part]] = defaultdict(list)
        for name, parameter in model.named_parameters():
            local = local_of(parameter)
            held = parameter if local is None else local
            if not self._meet(held, name) and type(held) in (nn.Parameter, Tensor):
                self._remember(held, name, is_fp8=False)
        for name, buffer in model.named_buffers():
            if type(buffer) is Tensor:
                self._remember(buffer, name, is_fp8=False)

    def meet(self, *operands: Any) -> None:
        """Remember the FP8 weights among the operands of an op; not all are parameters."""
        for x in tree_leaves(operands):
            self._meet(x, "an FP8 weight")

    def follow(self, func: Any, operands: Any, out: Any) -> None:
        """Remember ``out`` if the op, which is no matmul, has made it from a weight."""
        packet = getattr(func, "overloadpacket", None)
        is_value = isinstance(out, Tensor) and out.dtype in HIGH_PRECISION
        if not is_value or packet is aten.embedding:
            return
        for x in _plain(operands):
            part = self._part(x)
            if part is None or self._part(out) is not None:
                continue
            if packet in _COPIES or (part.is_fp8 and x.shape == out.shape):
                self._remember(out, part.of, part.is_fp8, str(packet))

    def reads_weight(self, operands: Any) -> bool:
        """Return True if an operand is, or is a copy of, any parameter or buffer."""
        return any(isinstance(x, nn.Parameter) or self._part(x) for x in _plain(operands))

    def misread(self, operands: Any) -> str:
        """Say how a matmul reads an FP8 weight in high precision; return "" if it does not."""
        for x in _plain(operands):
            part = self._part(x) if x.dtype in HIGH_PRECISION else None
            if part is not None and part.is_fp8:
                how = "the master" if x.numel() == part.numel else "a view"
                return f"reads {part.made_by or how} of {part.of}"
        return ""

    def _meet(self, x: Any, name: str) -> bool:
        if isinstance(x, BlockwiseFP8Weight):
            parts: tuple[Tensor | None, ...] = (x._cast_from,)
        elif isinstance(x, BlockwiseFP8Tensor) and x.format.transposes:
            parts = x.rowwise_data, x.columnwise_data
        else:
            return False
        for part in parts:
            known = None if part is None else self._part(part)
            if part is not None and not (known and known.is_fp8):
                self._remember(part, name, is_fp8=True)
        return True

    def _remember(self, x: Tensor, name: str, is_fp8: bool, made_by: str = "") -> None:
        storage = x.untyped_storage()
        part = _Part(*_extent(x), x.numel(), name, is_fp8, made_by, StorageWeakRef(storage))
        self._parts[storage._cdata].append(part)

    def _part(self, x: Tensor) -> _Part | None:
        """Return the part of a weight that overlaps with ``x``; of several, an FP8 weight."""
        start, end = _extent(x)
        known = self._parts.get(x.untyped_storage()._cdata, ())
        overlapping = (part for part in known if start < part.end and part.start < end)
        return max(overlapping, key=lambda part: part.is_fp8, default=None)


def _plain(operands: Any) -> Iterator[Tensor]:
    """Return the operands of two dimensions or more that have memory to compare."""
    for x in tree_leaves(operands):
        if isinstance(x, Tensor) and x.layout is torch.strided and x.ndim > 1:
            yield x


def _extent(x: Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that ``x`` may read, and the first that it does not."""
    start, size = int(x.storage_offset()), x.element_size()
    last = sum(int(n - 1) * int(stride) for n, stride in zip(x.shape, x.stride(), strict=True))
    return start * size, (start + last + 1) * size if x.numel() else start * size
