"""Collectives of a tensor parallel group that are begun now and awaited later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")


class Pending(Generic[Result]):
    """What collectives that run beside other work will return."""

    def __init__(self, parts: Sequence[Tensor], finish: Callable[..., Result]) -> None:
        """``finish``: makes the result of the awaited ``parts``."""
        self._parts, self._finish = parts, finish
        self._made: list[Result] = []

    def wait(self) -> Result:
        """The result; work of the current stream waits for it, and the host does not."""
        if not self._made:
            wait_tensor = torch.ops._c10d_functional.wait_tensor
            self._made.append(self._finish(*map(wait_tensor, self._parts)))
            self._parts = ()
        return self._made[0]


def ready(result: Result) -> Pending[Result]:
    """What is there already."""
    return Pending((), lambda: result)


def gather(parts: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Begin to gather contiguous tensors of all ranks along dimension 0, in one collective."""
    gathered: list[Tensor] = torch.ops._c10d_functional.all_gather_into_tensor_coalesced(
        list(parts), group.size(), group.group_name
    )
    return gathered


def all_reduce(x: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    """Reduce a contiguous tensor over all ranks, now."""
    ops = torch.ops._c10d_functional
    made: Tensor = ops.wait_tensor(ops.all_reduce(x, op, group.group_name))
    return made


@dataclass(frozen=True)
class Reduction:
    """How partial sums of the ranks of ``group`` are added.

    Attributes:
        group: of the ranks.
        dtype: in which partial sums travel; None: the dtype of the result.
        in_rank_order: whether every rank's partial sum is sent as it is, and they are added in
            fp32 in the order of ranks: the bits are then those of a loop over the ranks.
    """

    group: dist.ProcessGroup
    dtype: torch.dtype | None
    in_rank_order: bool

    def wire(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the partial sums of a result in ``dtype``."""
        return dtype if self.dtype is None else self.dtype

    def all_reduce(self, partial: Tensor) -> Pending[Tensor]:
        """Begin to add ``partial`` of all ranks; fp32 in rank order, else in its dtype."""
        name, ops = self.group.group_name, torch.ops._c10d_functional
        if self.in_rank_order:
            size = self.group.size()
            everyones = ops.all_gather_into_tensor(partial, size, name)
            return Pending([everyones], lambda all: _in_order(all.view(size, *partial.shape)))
        total = ops.all_reduce(partial, "sum", name)
        return Pending([total], _as_it_is)

    def reduce_scatter(self, partial: Tensor) -> Pending[Tensor]:
        """Begin to add ``partial[ranks, ...]`` of all ranks; each rank gets its own ``[...]``.

        The dtype is as of :meth:`all_reduce`.
        """
        name, ops = self.group.group_name, torch.ops._c10d_functional
        if self.in_rank_order:
            each = [1] * self.group.size()
            return Pending([ops.all_to_all_single(partial, each, each, name)], _in_order)
        total = ops.reduce_scatter_tensor(partial, "sum", self.group.size(), name)
        return Pending([total], lambda mine: mine[0])


def _in_order(partials: Tensor) -> Tensor:
    """The fp32 sum of ``partials[ranks, ...]``, from the first rank to the last."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial
    return total


def _as_it_is(x: Tensor) -> Tensor:
    return x
