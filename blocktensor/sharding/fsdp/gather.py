"""Gather an FP8 weight under FSDP2: the bytes that a rank sends, and the weight made from all.

    a weight [N, K]         Tensor parallelism, if any,        FSDP2 cuts each part again,
                            cuts it between 2 ranks. So        here between 2 ranks.
                            does expert parallelism.
    +--------------+        +--------------+                   +--------------+
    |              |        |  the part    |                   | master, rank 0   high precision
    |              |  -->   |  of rank 0   |            -->    +--------------+
    |              |        +--------------+                   | master, rank 1
    |              |        |  of rank 1   |                   +--------------+
    +--------------+        +--------------+

    Trainable, in a forward:

    master --amax of its share of each block--> table --one all-reduce for all weights--> scales
    master, scales --cast--> e4m3 rows, padded --all-gather--> e4m3 bytes of the part
    bytes, scales --> BlockwiseFP8Tensor, which the linear (of tensor parallelism) multiplies by

    Frozen: every rank holds e4m3 rows and all scales, so that the bytes are gathered without a
    cast.

FSDP calls ``fsdp_pre_all_gather`` for the bytes that a rank sends and ``fsdp_post_all_gather`` with
the gathered bytes: once for each weight in forward, and again in backward for weights that it has
freed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops import checks
from ...ops.formats import Quantized, ceil_div
from ...ops.scale_layouts import empty_scale
from ...recipe import Recipe
from ...tensor.base import FP8Base, MasterBase
from ...tensor.fp8_tensor import BlockwiseFP8Tensor, Generation
from ..dtensor import local_of
from .amax_table import Reduced, place_of
from .frozen_scales import compare_frozen
from .fsdp_internals import owner_of


class Sent(NamedTuple):
    """The facts about a weight that a rank knows without a gather.

    Attributes:
        shape, scale, recipe: of the whole weight.
        reduced: the amaxes and scales of a trainable weight; None for a frozen one.
    """

    shape: torch.Size
    scale: Tensor
    recipe: Recipe
    reduced: Reduced | None = None


Inputs = tuple[tuple[Tensor, ...], Sent]
"""The tensors that FSDP gathers, and the metadata for ``fsdp_post_all_gather``."""


class GatheredInFP8(FP8Base):
    """The base class of shards, which hold a rank's rows and create the weight from gathered bytes.

    Attributes:
        recipe: the :class:`~blocktensor.Recipe` of the weight's casts.
    """

    recipe: Recipe

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the rows, by which FSDP checks that they have not moved."""
        (rows, *_), _context = self.__tensor_flatten__()  # type: ignore[attr-defined]
        storage: torch.UntypedStorage = getattr(self, rows).untyped_storage()
        return storage

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype}, "
            f"scale={self.recipe.weight_format.scale_rounding!r}, device={str(self.device)!r})"
        )

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Sent,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return an FP8 weight that views the gathered bytes, or update an earlier one, ``out``.

        A trainable weight has its own scales, which change with its bytes: graphs save both. FSDP
        gathers into the same memory again, and neither bytes nor scales count these writes. The
        generation says which values the memory holds.
        """
        if torch.is_inference_mode_enabled():  # a forward for training may find it already gathered
            with torch.inference_mode(False):
                return self.fsdp_post_all_gather(all_gather_outputs, metadata, param_dtype, out=out)
        (gathered,), (shape, scale, recipe, reduced) = all_gather_outputs, metadata
        local = local_of(out)  # FSDP wraps the parts of tensor parallel weights
        weight: Any = out if local is None else local
        is_first = weight is None
        format = recipe.weight_format.stored
        data = gathered.view(-1)[: shape.numel()].view(shape).view(format.dtype)
        if reduced is not None:
            device = scale.device
            own = empty_scale(shape, format, device) if is_first else weight.rowwise_scale
            reduced.reduction.used_here()
            own.data.copy_(scale)
            scale = own
        if is_first:
            form = Quantized(data, scale, format)
            weight = BlockwiseFP8Tensor(form, None, shape=shape, dtype=param_dtype, recipe=recipe)
            weight.generation = None if reduced is None else Generation()
        else:
            weight.rowwise_data, weight.rowwise_scale = data, scale
            # the scales of the first gather, unless a load has assigned a shard with other scales
            weight.recipe, weight.rowwise_format = recipe, format
            weight.columnwise_format = format
        if reduced is not None:
            weight.generation.version = reduced.changes
        return (weight, ()) if is_first else None


class GatheredTrainable(GatheredInFP8, MasterBase):
    """Rows of a master, which are cast before they are gathered."""

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., Inputs]:
        """Return the method that FSDP calls for the tensors to gather.

        FSDP also reads this property when the root's first forward begins, before any gather. The
        ranks compare their weights then, while no rank waits in a collective.
        """
        if self.recipe.backward == "high_precision":
            raise NotImplementedError(
                f"the shard of an FP8 weight {list(self.shape)} with backward='high_precision': "
                f"FSDP2 gathers weights in FP8, and their data gradients would need the masters; "
                f"convert the model with backward='dequantized'"
            )
        place_of(owner_of(self))
        return self._cast_rows

    def _cast_rows(
        self, mesh: Any, outer_size: torch.Size, stride: Any, module: nn.Module, mp_policy: Any
    ) -> Inputs:
        """Return these rows as e4m3 bytes, cast by the scales of the whole weight."""
        place = place_of(owner_of(self, module))
        if place is None:
            raise RuntimeError(
                f"the shard of an FP8 weight of {type(module).__name__} is gathered, but not by "
                f"torch.distributed.fsdp.fully_shard: shard the converted model with that"
            )
        table, index, _ = place
        weight = table.weights[index]
        checks.high_precision(self.master, f"the sharded FP8 weight {weight.name!r}")
        reduced = table.prepare_gather(index)
        sent = padded(table.cast(index, self.master, reduced), weight.dim, outer_size, mesh)
        return (sent,), Sent(outer_size, reduced.scale, self.recipe, reduced)

    # FSDP inspects its signature in every gather of every weight: make this cheap
    _cast_rows.__signature__ = inspect.signature(_cast_rows)  # type: ignore[attr-defined]


class GatheredFrozen(GatheredInFP8):
    """Rows in e4m3, which are gathered without a cast.

    Attributes:
        data_rows: the rows, plain e4m3.
        scale: the scales of the whole weight.
    """

    data_rows: Tensor
    scale: Tensor

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., Inputs]:
        """Return the method that FSDP calls for the tensors to gather.

        The ranks compare their weights when FSDP reads this property, as for trainable weights.
        """
        compare_frozen(owner_of(self))
        return self._rows

    def _rows(
        self, mesh: Any, outer_size: torch.Size, stride: Any, module: nn.Module, mp_policy: Any
    ) -> Inputs:
        """Return the bytes of these rows, for FSDP to gather."""
        sizes = zip(self.shape, outer_size, strict=True)
        dim = next((d for d, (mine, whole) in enumerate(sizes) if mine != whole), 0)
        sent = padded(self.data_rows, dim, outer_size, mesh)
        return (sent,), Sent(outer_size, self.scale, self.recipe)

    _rows.__signature__ = inspect.signature(_rows)  # type: ignore[attr-defined]


def padded(data: Tensor, dim: int, whole: torch.Size, mesh: Any) -> Tensor:
    """Return a rank's e4m3 rows as FSDP gathers them, padded to the size of a full shard."""
    as_bytes = data.view(torch.uint8)  # gloo does not support e4m3
    missing = ceil_div(whole[dim], mesh.size()) - data.shape[dim]
    if missing <= 0:
        return as_bytes
    # only rows: FSDP shards other dimensions evenly
    return F.pad(as_bytes, [0, 0] * (data.ndim - 1 - dim) + [0, missing])
