"""The common part of both kinds of shard: FSDP gathers their bytes into an FP8 weight."""

from __future__ import annotations

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
    """Base class of shards: their rows, and the weight that FSDP makes of gathered bytes.

    Attributes:
        recipe: the :class:`~blocktensor.Recipe` of the weight's casts.
    """

    recipe: Recipe

    @property
    def rows(self) -> Tensor:
        """The plain tensor that this rank holds of the weight."""
        raise NotImplementedError

    def untyped_storage(self) -> torch.UntypedStorage:
        """Storage of the rows: FSDP tells by it whether they are still where it put them."""
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
        """The weight that views the gathered bytes; ``out``, made so before, is given new ones."""
        (gathered,), (shape, scale, recipe) = all_gather_outputs, metadata
        format = recipe.weight_format
        data = gathered.view(-1)[: shape.numel()].view(shape).view(format.dtype)
        if out is None:
            made = BlockwiseFP8Tensor(
                Quantized(data, scale, format),
                None,
                shape=shape,
                dtype=param_dtype,
                # a columnwise form that is kept would have to be gathered and freed by FSDP
                recipe=Recipe(scale=recipe.scale),
            )
            return made, ()
        weight: Any = local_of(out)
        weight = out if weight is None else weight
        weight.rowwise_data, weight.rowwise_scale = data, scale
        return None


def padded(data: Tensor, dim: int, whole: torch.Size, mesh: Any) -> Tensor:
    """A rank's e4m3 rows as FSDP gathers them: of the size that most ranks have."""
    as_bytes = data.view(torch.uint8)  # gloo knows no e4m3
    missing = ceil_div(whole[dim], mesh.size()) - data.shape[dim]
    if missing <= 0:
        return as_bytes
    # only along rows: FSDP shards other dimensions evenly
    return F.pad(as_bytes, [0, 0] * (data.ndim - 1 - dim) + [0, missing])
