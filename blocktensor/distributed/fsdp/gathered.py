"""The base class of both kinds of shard, whose bytes FSDP gathers into an FP8 weight."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.formats import Quantized, ceil_div
from ...recipe import Recipe
from ...tensor.base import FP8Base
from ...tensor.fp8_tensor import BlockwiseFP8Tensor
from ..dtensor import local_of


class GatheredInFP8(FP8Base):
    """Base class of shards, which hold a rank's rows and make the weight of gathered bytes.

    Attributes:
        recipe: the :class:`~blocktensor.Recipe` of the weight's casts.
    """

    recipe: Recipe

    @property
    def rows(self) -> Tensor:
        """The rows of the weight on this rank, a plain tensor."""
        raise NotImplementedError

    def untyped_storage(self) -> torch.UntypedStorage:
        """Storage of the rows, by which FSDP checks that they have not moved."""
        return self.rows.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype}, "
            f"scale={self.recipe.scale!r}, device={str(self.device)!r})"
        )

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """An FP8 weight that views the gathered bytes; an earlier one, ``out``, is updated."""
        (gathered,), (shape, scale, recipe) = all_gather_outputs, metadata
        format = recipe.weight_format
        data = gathered.view(-1)[: shape.numel()].view(shape).view(format.dtype)
        if out is None:
            made = BlockwiseFP8Tensor(
                Quantized(data, scale, format),
                None,
                shape=shape,
                dtype=param_dtype,
                recipe=_of_gathered(recipe),
            )
            return made, ()
        weight = gathered_of(out)
        weight.rowwise_data, weight.rowwise_scale = data, scale
        # those of the first gather, unless a load has assigned a shard with others
        weight.recipe, weight.rowwise_format = _of_gathered(recipe), format
        weight.columnwise_format = format
        return None


@functools.cache
def _of_gathered(recipe: Recipe) -> Recipe:
    """Of a gathered weight: FSDP would have to gather and free a cached columnwise form."""
    return Recipe(scale=recipe.scale, wgrad_input=recipe.wgrad_input)


def gathered_of(out: Tensor) -> BlockwiseFP8Tensor:
    """The weight of an earlier gather, which FSDP may have wrapped in a DTensor."""
    local: Any = local_of(out)
    weight: Any = out if local is None else local
    return weight


def padded(data: Tensor, dim: int, whole: torch.Size, mesh: Any) -> Tensor:
    """A rank's e4m3 rows as FSDP gathers them, padded to the size of a full shard."""
    as_bytes = data.view(torch.uint8)  # gloo does not support e4m3
    missing = ceil_div(whole[dim], mesh.size()) - data.shape[dim]
    if missing <= 0:
        return as_bytes
    # only along rows: FSDP shards other dimensions evenly
    return F.pad(as_bytes, [0, 0] * (data.ndim - 1 - dim) + [0, missing])
