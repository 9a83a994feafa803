"""Track the memory of weights in a run, and of results that depend on weights alone."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ..model.running_module import without_wrappers
from ..model.weights import full_name
from ..sharding.dtensor import own_part
from ..tensor.base import FP8Base
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight

aten = torch.ops.aten

_SELECT: set[Any] = {
    aten.embedding,
    aten.index,
    aten.index_select,
    aten.gather,
    aten.take_along_dim,
    aten._unsafe_index,
    aten.take,
}
"""Ops that select parts of their first operand: rows of a matrix are activations, matrices of a
stack are weights."""

BUFFER, PARAMETER, FP8_WEIGHT = range(3)
"""Kinds of weights, in ascending order: of several kinds in one memory, the highest counts."""


class Part(NamedTuple):
    """Bytes ``start`` to ``end`` of a storage, which hold a weight.

    Attributes:
        kind: :data:`BUFFER`, :data:`PARAMETER` or :data:`FP8_WEIGHT`.
        name: the name of the parameter or buffer.
        what: its values, or the op that computed the bytes from it.
        storage: the storage, kept alive so that its address is not reused.
    """

    start: int
    end: int
    kind: int
    name: str
    what: str
    storage: Any


class WeightMemory:
    """The memory of a model's weights, and of all that is computed from weights alone.

    Attributes:
        reads_high_precision: True if the recipe of a weight asks for wgrad in high precision.
        dgrad_in_high_precision: True if one asks for dgrad in high precision.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parts: dict[int, list[Part]] = defaultdict(list)
        self.reads_high_precision = self.dgrad_in_high_precision = False
        self._names = {id(x): without_wrappers(name) for name, x in model.named_parameters()}
        for name, held in model.named_parameters():
            self._hold(held, PARAMETER, without_wrappers(name))
        for name, buffer in model.named_buffers():
            self._hold(buffer, BUFFER, without_wrappers(name))

    def meet(self, *operands: Any) -> None:
        """Remember FP8 weights among the operands of an op, which may not be parameters."""
        for x in tree_leaves(operands):
            self._meet(x, "an FP8 weight")

    def enter(self, module: nn.Module, name: str) -> None:
        """Remember the present parameters of the module ``name``: FSDP2 gathers them elsewhere."""
        for key, held in module._parameters.items():
            if held is not None:
                full = self._names.get(id(held), full_name(name, key))
                self._hold(held, PARAMETER, full)

    def follow(self, func: Any, operands: Any, out: Any) -> None:
        """Remember ``out`` if the op computed it from weights alone.

        Numbers do not count as operands. Results of matmuls are not followed: learned queries times
        weights are activations.
        """
        packet = getattr(func, "overloadpacket", None)
        read = [x for x in tree_leaves(operands) if isinstance(x, Tensor) and x.numel() != 1]
        if packet in _SELECT:
            read = [x for x in read[:1] if x.ndim > 2]
        parts = [self.part(x) for x in read]
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return
        of = max(known, key=lambda part: part.kind)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.numel() != 1:
                self._remember(x, of.kind, of.name, str(packet))

    def read(self, operands: Any) -> Part | None:
        """Return the weight that a matmul reads: an FP8 weight, else a parameter, else a buffer.

        Of two weights of one kind, it is the right operand: the left one may be learned queries.
        """
        parts = [part for x in tree_leaves(operands) if (part := self.part(x, 2)) is not None]
        return max(reversed(parts), key=lambda part: part.kind, default=None)

    def part(self, x: Any, dims: int = 0) -> Part | None:
        """Return the weight of at least ``dims`` dimensions whose memory overlaps with ``x``."""
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.ndim < dims:
            return None
        start, end = _extent(x)
        known = self._parts.get(x.untyped_storage()._cdata, ())
        overlapping = (part for part in known if start < part.end and part.start < end)
        return max(overlapping, key=lambda part: part.kind, default=None)

    def _hold(self, held: Any, kind: int, name: str) -> None:
        held = own_part(held)
        if type(held) in (nn.Parameter, Tensor):
            self._remember(held, kind, name)
        self._meet(held, name)

    def _meet(self, x: Any, name: str) -> None:
        recipe: Any = getattr(x, "recipe", None) if isinstance(x, FP8Base) else None
        self.reads_high_precision |= recipe is not None and recipe.wgrad_input_format is None
        self.dgrad_in_high_precision |= recipe is not None and recipe.backward != "fp8"
        parts: tuple[Tensor | None, ...] = ()
        if isinstance(x, BlockwiseFP8Weight):
            parts = (x._cast_from,)
        elif isinstance(x, BlockwiseFP8Tensor) and x.format.transposes:
            parts = x.rowwise_data, x.columnwise_data
        for part in parts:
            if part is not None:
                self._remember(part, FP8_WEIGHT, name)

    def _remember(self, x: Tensor, kind: int, name: str, what: str = "the master") -> None:
        known = self.part(x)
        if known is None or known.kind < kind:
            storage = x.untyped_storage()
            part = Part(*_extent(x), kind, name, what, StorageWeakRef(storage))
            self._parts[storage._cdata].append(part)


def _extent(x: Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that ``x`` may read, and the byte after the last."""
    start, size = int(x.storage_offset()), x.element_size()
    last = sum(int(n - 1) * int(stride) for n, stride in zip(x.shape, x.stride(), strict=True))
    return start * size, (start + last + 1) * size if x.numel() else start * size
