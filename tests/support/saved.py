"""Saved tensors in plain torch: each rounded by the reference, in place of what was saved."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_1X128


def in_rows(x: Tensor) -> Tensor:
    """The values of ``x[R, C]`` after a cast to e4m3 in 1x128 blocks."""
    return reference.dequantize(reference.quantize_rowwise(x, BLOCKS_1X128), x.dtype)


@torch.no_grad()
def rounded(x: Tensor) -> Tensor:
    """The values of ``x`` after a cast of the tensor that it is a view of, row by row.

    Blocks of rows of less than 128 elements end where 128 elements of memory do.
    """
    base = x if x._base is None else x._base
    base = base.permute(sorted(range(base.ndim), key=base.stride, reverse=True))
    assert base.is_contiguous()
    values = in_rows(base.reshape(-1, max(128, base.shape[-1]))).flatten()
    made = values.as_strided(x.shape, x.stride(), x.storage_offset() - base.storage_offset())
    return made.clone()


def is_activation(x: Tensor) -> bool:
    """True for a tensor that autograd has computed, and not in the heads of attention."""
    base = x if x._base is None else x._base
    is_in_heads = x.ndim > 3 or (x.ndim == 3 and x.shape[-1] <= 256)
    return x.requires_grad and not base.is_leaf and x.numel() >= 4096 and not is_in_heads


def rounding(chosen: Callable[[Tensor], bool] = is_activation) -> saved_tensors_hooks:
    """Hooks that round the ``chosen`` tensors, unless their memory is kept for others."""
    kept: dict[int, StorageWeakRef] = {}

    def pack(x: Tensor) -> Tensor:
        if type(x) is Tensor:
            storage = x.untyped_storage()
            if chosen(x) and storage._cdata not in kept:
                return rounded(x)
            kept[storage._cdata] = StorageWeakRef(storage)
        return x.detach()

    return saved_tensors_hooks(pack, lambda x: x)
