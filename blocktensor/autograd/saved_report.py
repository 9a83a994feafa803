"""Report what autograd has saved, how, and in how many bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..text_table import Report, Table, human_bytes, plain
from .packed import MemoryRows, Packed
from .saved_kinds import PARAMETER, is_strided

IN_FP8 = "FP8"

_MAX_KEPT = 10_000
"""Pieces of memory that are remembered, before those that were freed are forgotten."""


class SavedKind(NamedTuple):
    """Saved tensors of one kind.

    Attributes:
        kept_as: ``"FP8"``, or why the tensors are kept as they are.
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
    """Count the tensors that autograd has saved since :meth:`start_counting`."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
        self._kept: dict[int, StorageWeakRef] = {}

    @property
    def kinds(self) -> tuple[SavedKind, ...]:
        """Return the kinds of saved tensors, largest first; a model holds its parameters itself."""
        kinds = (SavedKind(*key, *counts) for key, counts in self._counts.items())
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
                "in FP8" if kind.kept_as == IN_FP8 else f"as it is: {kind.kept_as}",
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
        self._count(IN_FP8, x, rows.numel * x.itemsize, packed.nbytes)

    def holds(self, x: Tensor) -> bool:
        """Return True if a tensor in the same memory is kept: a cast would only add to it."""
        return x.untyped_storage()._cdata in self._kept

    def count_kept(self, x: Tensor, reason: str) -> None:
        """Count the memory of a tensor that is kept for this reason, once."""
        if reason == PARAMETER:
            return
        if len(self._kept) > _MAX_KEPT:  # one context around many steps
            self._kept = {key: kept for key, kept in self._kept.items() if not kept.expired()}
        count = 0
        for part in _parts_of(x):
            storage = part.untyped_storage()
            if storage._cdata not in self._kept:
                self._kept[storage._cdata] = StorageWeakRef(storage)  # reserves the address
                count += storage.nbytes()
        if count:
            self._count(reason, x, count, count)

    def _count(self, kept_as: str, x: Tensor, before: int, after: int) -> None:
        key = kept_as, str(x.dtype).removeprefix("torch."), tuple(x.shape)
        counts = self._counts.setdefault(key, [0, 0, 0])
        for i, more in enumerate((1, before, after)):
            counts[i] += more


def _parts_of(x: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor consists of; none for sparse and nested ones."""
    if hasattr(x, "__tensor_flatten__"):
        return [part for name in x.__tensor_flatten__()[0] for part in _parts_of(getattr(x, name))]
    return [x] if is_strided(x) else []
