"""The part of an FP8 weight that a rank of a tensor parallel group holds.

A part that begins or ends inside a 128x128 block shares that block with other ranks. It takes the
scale of the whole block, from one maximum over the group. Matmuls read it behind as many zeros as
lie between the beginnings of the block and of the part. So it has the blocks, and the bits, of the
whole weight. Zeros add nothing to a sum over them; results for them are cut off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..autograd.plan import Plan
from ..autograd.saved_weight import ROWWISE, SavedWeight, WeightRead, read_weight
from ..ops.cast.ops import quantize_shard, shard_amax
from ..ops.formats import BlockFormat, Quantized
from ..ops.reference import scale_from_amax
from ..ops.scale_layouts import empty_scale
from ..recipe import Recipe
from ..sharding.fsdp.amax_table import ShardSlice
from ..tensor.operand import Operand
from ..tensor.weight import BlockwiseFP8Weight
from ..tensor.weight_cache import FP8Cache
from .collectives import all_reduce


@dataclass(frozen=True)
class WeightPart:
    """A part of a weight that lies off the grid of blocks, on this rank or on another.

    Attributes:
        group: of the ranks, which hold equal parts.
        slice: where this rank's part lies in the whole.
    """

    group: dist.ProcessGroup
    slice: ShardSlice

    @property
    def front(self) -> int:
        """Rows or columns of zeros in front of the part."""
        return sum(self.slice.offsets)

    def cast(self, part: Tensor) -> Quantized:
        """Cast a part and the zeros in front rowwise, with an all-reduce of 4 bytes a block."""
        format, (row, col) = self.slice.format, self.slice.offsets
        shape = format.scale_shape(self.slice.shape)
        table = torch.zeros(shape, dtype=torch.float32, device=part.device)
        own = self.slice.blocks(table, part)
        own.copy_(shard_amax(part, format, row, col))
        # as integers, magnitudes keep their order, with NaN above Inf
        greatest = all_reduce(table.view(torch.int32), "max", self.group).view(torch.float32)
        own = self.slice.blocks(greatest, part)
        data = quantize_shard(part, own.contiguous(), format, row, col)
        data = F.pad(data.view(torch.uint8), (col, 0, row, 0)).view(format.dtype)
        scale = empty_scale(data.shape, format, data.device).copy_(scale_from_amax(own, format))
        return Quantized(data, scale, format)

    def as_products_read(self, w: BlockwiseFP8Weight) -> BlockwiseFP8Weight:
        """Return the part ``w``, whose FP8 forms are :meth:`cast`.

        Its FP8 forms have the lifetimes that ``w.recipe`` says.
        """
        master, cache = w.master, w.cache
        make = lambda: _PartCache(cache.master, cache.recipe, cache.counted, self)  # noqa: E731
        return BlockwiseFP8Weight(master, cache=cache.derived(self, make))


class _PartCache(FP8Cache):
    """The casts of a part, which all ranks make together."""

    __slots__ = ("whole",)

    def __init__(self, master: Tensor, recipe: Recipe, counted: Tensor, whole: WeightPart) -> None:
        super().__init__(master, recipe, counted)
        self.whole = whole

    def cast(self, rowwise: bool = True, columnwise: bool = False) -> Operand:
        # the columnwise form is a transpose, made when it is needed
        self.casts += 1
        return Operand(self.whole.cast(self.master), None)


def part_off_grid(
    shape: tuple[int, ...], dim: int, group: dist.ProcessGroup, format: BlockFormat
) -> WeightPart | None:
    """Return this rank's part of a weight; None if parts begin and end where blocks do."""
    each = shape[dim] // group.size()
    if each % format.block_shape[dim] == 0:
        return None
    return WeightPart(group, ShardSlice(shape, dim, dist.get_rank(group) * each, format))


def read_part(w: Tensor, part: WeightPart | None, plan: Plan) -> WeightRead:
    """Read a weight that may lie off the grid; see ``read_weight``."""
    if part is None:
        return read_weight(w, plan)
    assert isinstance(w, BlockwiseFP8Weight)
    if not plan.tracing:
        return read_weight(part.as_products_read(w), plan)
    # saved for backward: a second cast there would be a second all-reduce
    w_row = part.cast(w._cast_from)
    return w_row, w_row[:2] if plan.needs[0] else (), SavedWeight(plan, ROWWISE)
