"""Cast the part of an FP8 weight that a rank of a tensor parallel group holds.

A part that begins or ends inside a 128x128 block shares that block with other ranks. It takes the
scale of the whole block (``sharding/part.py``). Zeros are put in front of its cast, which fill the
first block up: so it has the same blocks and bits as in the whole weight. The zeros add nothing to
sums, and their results are cut off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..autograd.plan import Plan
from ..autograd.saved_weight import ROWWISE, SavedWeight, WeightRead, read_weight
from ..ops.formats import BlockFormat, Quantized
from ..ops.reference import scale_from_amax
from ..ops.scale_layouts import empty_scale
from ..recipe import Recipe
from ..sharding.part import Part, Region, check_groups, max_over_ranks
from ..tensor.operand import Operand
from ..tensor.weight import BlockwiseFP8Weight
from ..tensor.weight_cache import FP8Cache


@dataclass(frozen=True)
class WeightPart:
    """A part of a weight that begins or ends inside a block, on this rank or on another.

    Attributes:
        group: of the ranks, which hold equal parts.
        part: this rank's part.
    """

    group: dist.ProcessGroup
    part: Part

    @property
    def front(self) -> int:
        """The number of rows or columns of zeros in front of the part."""
        return sum(self.part.offsets)

    def cast(self, values: Tensor) -> Quantized:
        """Cast a part with zeros in front rowwise, with an all-reduce of 4 bytes for each block."""
        part, format = self.part, self.part.format
        table = torch.zeros(part.scale_shape, dtype=torch.float32, device=values.device)
        table[part.blocks].copy_(part.amax(values))
        amax = max_over_ranks(table, self.group, functional=True)[part.blocks]
        data = part.cast(values, amax.contiguous())
        row, col = part.offsets
        data = F.pad(data.view(torch.uint8), (col, 0, row, 0)).view(format.dtype)
        scale = empty_scale(data.shape, format, data.device).copy_(scale_from_amax(amax, format))
        return Quantized(data, scale, format.stored)

    def as_matmuls_read(self, w: BlockwiseFP8Weight) -> BlockwiseFP8Weight:
        """Return the part ``w`` as a weight whose FP8 forms come from :meth:`cast`.

        They live as long as ``w.recipe`` says.
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
    """Return this rank's part of a weight; None if all parts consist of whole blocks."""
    each = shape[dim] // group.size()
    check_groups(shape, dim, each, format)
    if each % format.block_shape[dim] == 0:
        return None
    region = Region.along(dim, dist.get_rank(group) * each, each, shape)
    return WeightPart(group, Part(shape, region, format))


def read_part(w: Tensor, part: WeightPart | None, plan: Plan) -> WeightRead:
    """Read a weight that may begin or end inside a block; see ``read_weight``."""
    if part is None:
        return read_weight(w, plan)
    assert isinstance(w, BlockwiseFP8Weight)
    if not plan.tracing:
        return read_weight(part.as_matmuls_read(w), plan)
    # saved for backward: a second cast there would be a second all-reduce
    w_row = part.cast(w._cast_from)
    return w_row, w_row[:2] if plan.needs[0] else (), SavedWeight(plan, ROWWISE)
