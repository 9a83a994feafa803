"""Report what autograd has saved, how, and in how many bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..text_table import Report, Table, human_bytes, plain
from .packed import MemoryRows, Packed
from .saved_kinds import PARAMETER, is_strided

IN_FP8 = "FP8"
PACKED_IN_GRAPH = "FP8, by a compiled graph"
IN_GRAPH = "by a compiled graph"

_IN_WORDS = {IN_FP8: "in FP8", PACKED_IN_GRAPH: "packed by a compiled graph"}
"""The words of tables for tensors that are packed, by ``kept_as``."""

_Counts: TypeAlias = dict[tuple[str, torch.dtype, tuple[int, ...]], list[int]]
"""The number of tensors and bytes before and after, by how they are kept, dtype and shape."""

_MAX_KEPT = 10_000
"""Pieces of memory that are remembered, before those that were freed are forgotten."""


class SavedKind(NamedTuple):
    """Saved tensors of one kind.

    Attributes:
        kept_as: ``"FP8"``, ``"FP8, by a compiled graph"``, or why the tensors are kept as they are.
        dtype, shape: of the tensors.
        tensors: their number; tensors that share memory count once.
        bytes_before: memory that autograd would hold.
        bytes_after: memory that it holds.
    """

    kept_as: str
    dtype: str
    shape: tuple[int, ...]
    tensors: int
    bytes_before: int
    bytes_after: int


class SavedReport(Report):
    """Count the tensors that autograd has saved since :meth:`start_counting`.

    Graphs that were compiled meanwhile, at any time, count as one run of each.
    """

    def __init__(self) -> None:
        self._counts: _Counts = {}
        self._of_graphs: _Counts = {}
        self._kept: dict[int, StorageWeakRef] = {}

    @property
    def kinds(self) -> tuple[SavedKind, ...]:
        """Return the kinds of saved tensors, largest first; a model holds its parameters itself."""
        counts = itertools.chain(self._counts.items(), self._of_graphs.items())
        kinds = (
            SavedKind(kept_as, str(dtype).removeprefix("torch."), tuple(shape), *sums)
            for (kept_as, dtype, shape), sums in counts
        )
        return tuple(sorted(kinds, key=lambda kind: -kind.bytes_before))

    @property
    def bytes_before(self) -> int:
        """Bytes that autograd would hold without this context."""
        return sum(kind.bytes_before for kind in self.kinds)

    @property
    def bytes_after(self) -> int:
        """Bytes that autograd holds."""
        return sum(kind.bytes_after for kind in self.kinds)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as values that ``json.dumps`` takes."""
        return {**super().to_dict(), "kinds": plain(self.kinds)}

    def _parts(self) -> list[Table | str]:
        before, after = self.bytes_before, self.bytes_after
        if not before:
            return ["nothing was saved"]
        rows = [
            (
                kind.dtype,
                list(kind.shape),
                kind.tensors,
                human_bytes(kind.bytes_before),
                human_bytes(kind.bytes_after),
                _IN_WORDS.get(kind.kept_as, f"as it is: {kind.kept_as}"),
            )
            for kind in self.kinds
        ]
        header = "dtype", "shape", "tensors", "memory", "memory now", "saved"
        summary = (
            f"{human_bytes(after)} wait for backward instead of {human_bytes(before)} "
            f"({after / before:.2f}x)"
        )
        return [Table(header, rows), summary]

    def start_counting(self) -> None:
        """Forget what was counted before."""
        self._counts, self._kept = {}, {}

    def stop_counting(self) -> None:
        """Forget which memory is kept."""
        self._kept = {}

    def count_packed(self, x: Tensor, rows: MemoryRows, packed: Packed) -> None:
        """Count a tensor that was packed for its first saver."""
        _add(self._counts, IN_FP8, x.dtype, x.shape, rows.numel * x.itemsize, packed.nbytes)

    def uncount_packed(self, x: Tensor, rows: MemoryRows, nbytes: int) -> None:
        """Take back :meth:`count_packed` of a tensor that is kept after all, in place of a cast."""
        _add(self._counts, IN_FP8, x.dtype, x.shape, -rows.numel * x.itemsize, -nbytes, -1)

    def holds(self, x: Tensor) -> bool:
        """Return True if a tensor in the same memory is kept: a cast would only add to it."""
        return x.untyped_storage()._cdata in self._kept

    def count_kept(self, x: Tensor, reason: str) -> None:
        """Count the memory of a tensor that is kept for this reason, once."""
        if reason == PARAMETER:
            return
        if len(self._kept) > _MAX_KEPT:  # one context around many steps
            self._kept = {key: kept for key, kept in self._kept.items() if not kept.expired()}
        count = sum(map(self._keep, _parts_of(x)))
        if count:
            _add(self._counts, reason, x.dtype, x.shape, count, count)

    def _keep(self, x: Tensor) -> int:
        """Return the bytes of memory that is kept from now on."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._kept:
            return 0
        self._kept[key] = StorageWeakRef(storage)  # reserves the address
        return storage.nbytes()

    def count_in_graph(self, x: Tensor, saved: Tensor | Sequence[object]) -> None:
        """Count an intermediate of a compiled graph.

        Args:
            x: the intermediate.
            saved: what the graph saves: x itself, or tensors and constants.
        """
        kept_as = IN_GRAPH if isinstance(saved, Tensor) else PACKED_IN_GRAPH
        parts = [saved] if isinstance(saved, Tensor) else saved
        sizes = tuple(map(_hint, x.shape))
        after = sum(
            math.prod(map(_hint, part.shape)) * part.itemsize
            for part in parts
            if isinstance(part, Tensor)
        )
        _add(self._of_graphs, kept_as, x.dtype, sizes, math.prod(sizes) * x.itemsize, after)


def _add(
    counts: _Counts,
    kept_as: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    before: int,
    after: int,
    tensors: int = 1,
) -> None:
    key = kept_as, dtype, shape
    sums = counts.setdefault(key, [0, 0, 0])
    sums[0] += tensors
    sums[1] += before
    sums[2] += after
    if not sums[0]:
        del counts[key]


def _hint(size: Any) -> int:
    """Return a size; of a symbolic one, the size for which the graph was traced."""
    return size if isinstance(size, int) else size.node.hint


def _parts_of(x: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor consists of; none for sparse and nested ones."""
    if hasattr(x, "__tensor_flatten__"):
        held = [getattr(x, name) for name in x.__tensor_flatten__()[0]]  # a DTensor has its mesh
        return [part for each in held if isinstance(each, Tensor) for part in _parts_of(each)]
    return [x] if is_strided(x) else []
