"""Begin collectives of a tensor parallel group now, and wait for them later.

Gathers of tokens are exact. Rowwise 1x128 blocks lie within a row, so gathered casts of the parts
equal a cast of the whole, byte for byte. Columnwise blocks lie along the tokens: gathered casts
equal a cast of the whole if each part begins and ends where blocks do (``TokenShards.on_grid``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.formats import BlockFormat, Quantized
from ..ops.scale_layouts import scale_of_lines

Result = TypeVar("Result")


class Pending(Generic[Result]):
    """The future result of collectives."""

    def __init__(self, parts: Sequence[Tensor], finish: Callable[..., Result]) -> None:
        """Compute the result by ``finish`` from the awaited ``parts``."""
        self._parts, self._finish = parts, finish
        self._made: list[Result] = []

    def wait(self) -> Result:
        """Return the result; the current stream waits for it, the host does not."""
        if not self._made:
            wait_tensor = torch.ops._c10d_functional.wait_tensor
            self._made.append(self._finish(*map(wait_tensor, self._parts)))
            self._parts = ()
        return self._made[0]


def ready(result: Result) -> Pending[Result]:
    """Return a result that is already complete."""
    return Pending((), lambda: result)


def gather(parts: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Begin to gather contiguous tensors of all ranks along dimension 0, in one collective."""
    gathered: list[Tensor] = torch.ops._c10d_functional.all_gather_into_tensor_coalesced(
        list(parts), group.size(), group.group_name
    )
    return gathered


@dataclass(frozen=True)
class Reduction:
    """The addition of partial sums of the ranks of ``group``.

    Attributes:
        group: the group of the ranks.
        dtype: the dtype in which ranks send partial sums; None for the dtype of the result.
        in_rank_order: send every partial sum unchanged and add them in fp32 in the order of ranks,
            with the same bits as a loop over ranks.
    """

    group: dist.ProcessGroup
    dtype: torch.dtype | None
    in_rank_order: bool

    def wire(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which ranks send partial sums of a result in ``dtype``."""
        return dtype if self.dtype is None else self.dtype

    def all_reduce(self, partial: Tensor) -> Pending[Tensor]:
        """Begin to add ``partial`` over all ranks; fp32 in rank order, else in its dtype."""
        name, ops = self.group.group_name, torch.ops._c10d_functional
        if self.in_rank_order:
            size = self.group.size()
            everyones = ops.all_gather_into_tensor(partial, size, name)
            return Pending([everyones], lambda all: _in_order(all.view(size, *partial.shape)))
        total = ops.all_reduce(partial, "sum", name)
        return Pending([total], lambda total: total)

    def reduce_scatter(self, partial: Tensor) -> Pending[Tensor]:
        """Begin to add ``partial[ranks, ...]`` over all ranks; rank r gets the sum ``[r, ...]``.

        The sum is fp32 in rank order, else in its dtype.
        """
        name, ops = self.group.group_name, torch.ops._c10d_functional
        if self.in_rank_order:
            each = [1] * self.group.size()
            return Pending([ops.all_to_all_single(partial, each, each, name)], _in_order)
        total = ops.reduce_scatter_tensor(partial, "sum", self.group.size(), name)
        return Pending([total], lambda mine: mine[0])


def _in_order(partials: Tensor) -> Tensor:
    """Return the fp32 sum of ``partials[ranks, ...]``, from the first rank to the last."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial
    return total


@dataclass(frozen=True)
class TokenShards:
    """Activations ``[..., K]`` cut along one of the leading dimensions, in equal parts.

    Flattened to rows, the whole has ``outer`` runs, each with ``inner`` rows of every rank.

    Attributes:
        group: the group of the ranks.
        dim: the dimension that is cut, counted from the front.
        outer: the product of the dimensions before ``dim``.
        inner: the product of this rank's dimensions from ``dim`` on, except the last.
    """

    group: dist.ProcessGroup
    dim: int
    outer: int
    inner: int

    @staticmethod
    def of(shape: Sequence[int], dim: int, group: dist.ProcessGroup) -> TokenShards:
        """Describe tokens, given the ``shape`` of this rank's part."""
        return TokenShards(group, dim, math.prod(shape[:dim]), math.prod(shape[dim:-1]))

    @staticmethod
    def of_whole(shape: Sequence[int], dim: int, group: dist.ProcessGroup) -> TokenShards:
        """Describe the parts of tokens, given the ``shape`` of the whole.

        Raises:
            ValueError: the ranks cannot hold equal parts.
        """
        ranks = group.size()
        if shape[dim] % ranks:
            raise ValueError(
                f"dimension {dim} of an output {list(shape)} cannot be cut into equal parts for "
                f"{ranks} ranks: pad the tokens to a multiple of {ranks}"
            )
        return TokenShards.of([*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :]], dim, group)

    @property
    def ranks(self) -> int:
        """The number of parts."""
        return self.group.size()

    def on_grid(self, format: BlockFormat) -> bool:
        """True if the parts have the columnwise blocks of the whole."""
        return self.inner % format.cols == 0

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of all tokens, given the shape of a part."""
        return (*shape[: self.dim], shape[self.dim] * self.ranks, *shape[self.dim + 1 :])

    def part_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a part, given the shape of all tokens."""
        return (*shape[: self.dim], shape[self.dim] // self.ranks, *shape[self.dim + 1 :])

    def gather_rowwise(self, part: Quantized) -> Pending[Quantized]:
        """Begin to gather the rowwise form of the whole."""
        format = part.format
        blocks = part.scale.shape[1]
        runs = self.ranks, blocks, self.outer, self.inner

        def finish(data: Tensor, scale: Tensor) -> Quantized:
            data = self._in_order(data).view(format.dtype)
            lines = scale.view(runs).permute(1, 2, 0, 3).reshape(blocks, data.shape[0])
            return Quantized(data, scale_of_lines(lines), format)

        return self._gather(part, finish)

    def gather_columnwise(self, part: Quantized) -> Pending[Quantized]:
        """Begin to gather the columnwise form of the whole; parts must be on the grid of blocks."""
        format = part.format
        assert self.on_grid(format)
        rows, tokens = part.data.shape[0], self.outer * self.ranks * self.inner
        blocks = self.inner // format.cols

        def finish(data: Tensor, scale: Tensor) -> Quantized:
            data = data.view(self.ranks, rows, self.outer, self.inner).permute(1, 2, 0, 3)
            data = data.reshape(rows, tokens).view(format.dtype)
            by_runs = scale.view(self.ranks, self.outer, blocks, part.scale.shape[0]).transpose(
                0, 1
            )
            return Quantized(data, scale_of_lines(by_runs.flatten(0, 2)), format)

        return self._gather(part, finish)

    def gather_plain(self, part: Tensor) -> Pending[Tensor]:
        """Begin to gather the rows ``[M, K]`` of the whole."""
        return Pending(gather([part.contiguous()], self.group), self._in_order)

    def reduce_scatter(self, partial: Tensor, reduction: Reduction) -> Pending[Tensor]:
        """Begin to add ``partial[M, N]`` over all ranks; each gets the rows of its part."""
        rows, width = self.outer * self.inner, partial.shape[1]
        runs = partial.view(self.outer, self.ranks, self.inner, width).transpose(0, 1)
        return reduction.reduce_scatter(runs.reshape(self.ranks, rows, width))

    def _gather(
        self, part: Quantized, finish: Callable[[Tensor, Tensor], Quantized]
    ) -> Pending[Quantized]:
        # bytes, since gloo does not support e4m3 and converts tensors of several dtypes to one;
        # scales as lines, without padding
        sent = part.data.view(torch.uint8), part.scale.t().contiguous().flatten().view(torch.uint8)
        return Pending(
            gather(sent, self.group),
            lambda data, scale: finish(data, scale.view(torch.float32)),
        )

    def _in_order(self, gathered: Tensor) -> Tensor:
        """Reorder gathered rows from the order of ranks to the order of tokens."""
        if self.outer == 1:
            return gathered
        rows, width = gathered.shape
        runs = gathered.view(self.ranks, self.outer, self.inner, width).transpose(0, 1)
        return runs.reshape(rows, width)
