"""The ops by which ``fully_shard`` makes shards of FP8 weights: ``new_zeros`` and ``chunk``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.formats import Quantized
from ...tensor.fp8_tensor import BlockwiseFP8Tensor
from ...tensor.refusals import refuse
from ...tensor.weight import BlockwiseFP8Weight
from .frozen import FrozenShard
from .places import check_no_main_grad
from .trainable import FP8Shard

aten = torch.ops.aten


def chunks(weight: BlockwiseFP8Tensor, *args: Any, **kwargs: Any) -> list[FrozenShard]:
    """``torch.chunk`` of a frozen weight in 128x128 blocks; a chunk may begin inside a block."""
    data, scale, _ = _squares(weight)
    parts = torch.chunk(data, *args, **kwargs)
    return [FrozenShard(part, scale, weight.recipe, weight.dtype) for part in parts]


def _squares(weight: BlockwiseFP8Tensor) -> Quantized:
    if not weight.format.transposes:
        raise NotImplementedError(
            f"FSDP2 can shard FP8 weights in 128x128 blocks, got blocks of {weight.block_shape}"
        )
    return weight.rowwise()


def _frozen_zeros(
    func: Any,
    x: BlockwiseFP8Tensor,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> FrozenShard:
    if len(size) != x.ndim or dtype not in (None, x.dtype) or device not in (None, x.device):
        refuse(func)
    data, scale, _format = _squares(x)
    zeros = torch.zeros(tuple(size), dtype=torch.uint8, device=data.device).view(data.dtype)
    return FrozenShard(zeros, scale, x.recipe, x.dtype)


def _trainable_zeros(
    func: Any, w: BlockwiseFP8Weight, size: Sequence[int], **kwargs: Any
) -> Tensor:
    """Zeros: a shard where FSDP asks for one, plain for another rank, dtype or device."""
    zeros: Tensor = func(w.master, size, **kwargs)
    check_no_main_grad(w.main_grad)
    is_part = zeros.ndim == w.ndim and zeros.dtype == w.dtype and zeros.device == w.device
    return FP8Shard(zeros, w.recipe) if is_part else zeros


FROZEN_SHARDS: dict[Any, Callable[..., Any]] = {aten.new_zeros.default: _frozen_zeros}
"""Ops of BlockwiseFP8Tensor that begin a shard."""

TRAINABLE_SHARDS: dict[Any, Callable[..., Any]] = {aten.new_zeros.default: _trainable_zeros}
"""Ops of BlockwiseFP8Weight that begin a shard."""
