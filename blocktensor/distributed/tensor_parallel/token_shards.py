"""Tokens of which every rank holds a part: gathered in FP8, and reduced to parts again.

A gather of tokens is exact: 1x128 blocks lie within a row, so the rowwise casts of the parts are
those of the whole, byte for byte. Columnwise blocks lie along the tokens. Those of the parts are
those of the whole if each part begins and ends where blocks do (:attr:`TokenShards.on_grid`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.formats import BlockFormat, Quantized
from ...ops.scale_layouts import scale_of_lines
from .collectives import Pending, Reduction, gather


@dataclass(frozen=True)
class TokenShards:
    """Activations ``[..., K]`` cut along one of the leading dimensions, in equal parts.

    Flattened to rows, the whole consists of ``outer`` runs, each of ``inner`` rows of every rank.

    Attributes:
        group: of the ranks.
        dim: that is cut, counted from the front.
        outer: the product of the dimensions before ``dim``.
        inner: the product of this rank's dimensions from ``dim`` on, without the last.
    """

    group: dist.ProcessGroup
    dim: int
    outer: int
    inner: int

    @staticmethod
    def of(shape: Sequence[int], dim: int, group: dist.ProcessGroup) -> TokenShards:
        """The shards of which this rank's one has ``shape``."""
        return TokenShards(group, dim, math.prod(shape[:dim]), math.prod(shape[dim:-1]))

    @staticmethod
    def of_whole(shape: Sequence[int], dim: int, group: dist.ProcessGroup) -> TokenShards:
        """The shards of a whole of ``shape``.

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
        """Whether the columnwise blocks of the parts are those of the whole."""
        return self.inner % format.cols == 0

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole, of a part of ``shape``."""
        return (*shape[: self.dim], shape[self.dim] * self.ranks, *shape[self.dim + 1 :])

    def part_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a part, of a whole of ``shape``."""
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
        """Begin to gather the columnwise form of the whole, of parts that are on the grid."""
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
        """Begin to add ``partial[M, N]`` of all ranks; each gets the rows of its part."""
        rows, width = self.outer * self.inner, partial.shape[1]
        runs = partial.view(self.outer, self.ranks, self.inner, width).transpose(0, 1)
        return reduction.reduce_scatter(runs.reshape(self.ranks, rows, width))

    def _gather(
        self, part: Quantized, finish: Callable[[Tensor, Tensor], Quantized]
    ) -> Pending[Quantized]:
        # bytes: gloo does not support e4m3, and converts tensors of several dtypes to one; scales
        # by lines, without their padding
        sent = part.data.view(torch.uint8), part.scale.t().contiguous().view(torch.uint8)
        return Pending(
            gather(sent, self.group),
            lambda data, scale: finish(data, scale.flatten().view(torch.float32)),
        )

    def _in_order(self, gathered: Tensor) -> Tensor:
        """Rows as the whole has them, of rows rank by rank."""
        if self.outer == 1:
            return gathered
        rows, width = gathered.shape
        runs = gathered.view(self.ranks, self.outer, self.inner, width).transpose(0, 1)
        return runs.reshape(rows, width)
