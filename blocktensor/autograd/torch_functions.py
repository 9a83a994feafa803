"""The torch functions that the FP8 types override, above autograd.

Products lead to the FP8 linear: ``matmul(a, b)`` is ``linear(a, b.t())``, since t() of an FP8
operand is a relabelling. Products without an FP8 path are refused. All other functions reach
``tensor/aten_*.py``, below autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from ..ops import checks
from ..ops.formats import BLOCK, ceil_div
from ..tensor.base import MasterBase
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.swap_in import swap_in
from ..tensor.weight import BlockwiseFP8Weight
from .backward_calls import BACKWARD_CALLS
from .grouped_functions import (
    TRANSFORMERS_FALLBACK,
    baddbmm,
    bmm,
    grouped_mm,
    grouped_mm_fallback,
    is_stack,
    is_weight,
)
from .linear import linear
from .linear_cross_entropy import CrossEntropy, linear_cross_entropy
from .plan import autocast_dtype
from .product_calls import IN_PLACE, in_all_forms, plus
from .torch_callers import BY_CALLER


def _linear_override(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if isinstance(input, MasterBase):
        return _linear_of_a_weight(input, weight, bias)
    return linear(input, weight, bias)


_linear_of_a_weight = in_all_forms(F.linear, linear)


def _matmul_override(input: Tensor, other: Tensor, **_: None) -> Tensor:
    if other.ndim == 2 and not is_weight(input):
        return linear(input, other.t())
    if input.ndim == other.ndim == 3 and is_stack(input) != is_stack(other):
        return bmm(input, other)
    if input.ndim == 2 and other.ndim == 1 and is_weight(input):  # w v
        return linear(other, input)
    if input.ndim == 2 and other.ndim > 1 and is_weight(input) and not is_stack(other):
        # a weight on the left: (bᵀ wᵀ)ᵀ
        return linear(other.transpose(-1, -2), input).transpose(-1, -2)
    raise NotImplementedError(
        f"matmul of {list(input.shape)} by {list(other.shape)} has no FP8 path: the right operand "
        f"must be a matrix [K, N], or a stack of experts [E, K, N] and the left one [E, T, K]; "
        f"call .dequantize(), or .high_precision() of a BlockwiseFP8Weight, to compute in high "
        f"precision"
    )


def _rmatmul_override(self: Tensor, other: Tensor) -> Tensor:
    return _matmul_override(other, self)


def _addmm_override(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, **_: None
) -> Tensor:
    if input.ndim == 1 and beta == 1 and alpha == 1 and not is_weight(mat1):
        return linear(mat1, mat2.t(), input)
    return plus(_matmul_override(mat1, mat2), input, beta, alpha)


def _linear_cross_entropy_override(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    """In the chunks of ``options`` where torch would take them, and reduces the losses itself."""
    ignored = -100 if ignore_index is None else ignore_index
    in_chunks = options is not None and reduction != "none" and target.dtype == torch.int64
    if (
        is_compiling()
        or not in_chunks
        or linear_weight.ndim != 2
        or isinstance(input, BlockwiseFP8Tensor)
    ):
        logits = linear(input, linear_weight, linear_bias)
        return F.cross_entropy(
            logits,
            target,
            weight,
            ignore_index=ignored,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    rows = options.batch_chunk_size
    loss = CrossEntropy(weight, reduction, ignored, label_smoothing)
    chunk = None if rows is None else ceil_div(rows, BLOCK) * BLOCK
    made = linear_cross_entropy(input, linear_weight, target, linear_bias, loss, chunk, None)
    return made.to(autocast_dtype(input) or input.dtype)


def _get_data(tensor: Tensor) -> Tensor:
    # detach() shares the version counter, which .data does not: writes through it are noticed
    return tensor.detach()


def _set_data(tensor: Tensor, new: Tensor) -> None:
    shape, dtype = tuple(tensor.shape), new.dtype
    if not isinstance(tensor, BlockwiseFP8Weight) or shape != tuple(new.shape):
        raise NotImplementedError(
            f"cannot set .data of {tensor!r} to a tensor of shape {list(new.shape)}, {dtype} "
            f"on {new.device}: use .copy_(), or torch.utils.swap_tensors to change the type"
        )
    if isinstance(new, BlockwiseFP8Tensor):
        raise TypeError(
            f"the new .data of an FP8 weight is {new!r}, which holds no high-precision values: "
            f"call .dequantize() first, or blocktensor.freeze(model) to drop the masters"
        )
    checks.high_precision(new, "the new .data of an FP8 weight")
    master = new.master if isinstance(new, BlockwiseFP8Weight) else new.detach()
    if (tensor.dtype, tensor.device) == (dtype, new.device):
        tensor.replace_master(master)
    else:
        swap_in(tensor, BlockwiseFP8Weight(master, tensor.recipe))


def _share_memory(tensor: BlockwiseFP8Tensor | BlockwiseFP8Weight) -> Tensor:
    # torch's own would look for the storage of the wrapper, which has none
    with torch._C.DisableTorchFunctionSubclass():
        for name in tensor.__tensor_flatten__()[0]:
            getattr(tensor, name).share_memory_()
    return tensor


def _of_values(name: str) -> Callable[..., Any]:
    """``Tensor.name``, of the master of a weight; torch itself would read a wrapper's memory."""

    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, BlockwiseFP8Weight):
            return getattr(tensor.high_precision(), name)(*args, **kwargs)
        if isinstance(tensor, MasterBase):  # a rank's rows
            return getattr(tensor.master, name)(*args, **kwargs)
        raise NotImplementedError(
            f"a {type(tensor).__name__} has no {name}(), since it holds no high-precision values: "
            f"call .dequantize() first, or take .rowwise_data and .rowwise_scale"
        )

    return run


def _no_fp8_path(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{name} has no FP8 path, and computing it in high precision would be silent: use "
            f"F.linear, torch.mm, torch.matmul or torch.addmm, of a stack of experts F.grouped_mm "
            f"or torch.bmm; or say so on purpose with "
            f".high_precision() of a BlockwiseFP8Weight, .dequantize() of a BlockwiseFP8Tensor"
        )

    return refuse


_PRODUCTS_WITHOUT_FP8 = {
    torch: "einsum tensordot inner addbmm addmv dot vdot chain_matmul bilinear "
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d cdist cov corrcoef",
    F: "bilinear conv1d conv2d conv3d multi_head_attention_forward scaled_dot_product_attention",
    torch.linalg: "matmul multi_dot vecdot",
    torch.sparse: "mm addmm",
    Tensor: "inner addbmm addmv dot vdot addmv_ addbmm_",
}

_PRODUCTS: dict[Any, Callable[..., Any]] = {
    torch.mm: _matmul_override,
    Tensor.mm: _matmul_override,
    torch.mv: _matmul_override,
    Tensor.mv: _matmul_override,
    torch.matmul: _matmul_override,
    Tensor.matmul: _matmul_override,
    Tensor.__matmul__: _matmul_override,
    Tensor.__rmatmul__: _rmatmul_override,
    torch.addmm: _addmm_override,
    Tensor.addmm: _addmm_override,
    torch.bmm: bmm,
    Tensor.bmm: bmm,
    torch.baddbmm: baddbmm,
    Tensor.baddbmm: baddbmm,
    **IN_PLACE,
    **{
        getattr(namespace, name): _no_fp8_path(name)
        for namespace, names in _PRODUCTS_WITHOUT_FP8.items()
        for name in names.split()
        if hasattr(namespace, name)  # torch versions differ
    },
}

OVERRIDES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear_override,
    **{func: in_all_forms(func, override) for func, override in _PRODUCTS.items()},
    # torch 2.13
    **(
        {F.linear_cross_entropy: _linear_cross_entropy_override}
        if hasattr(F, "linear_cross_entropy")
        else {}
    ),
    torch._grouped_mm: grouped_mm,
    TRANSFORMERS_FALLBACK: grouped_mm_fallback,
    Tensor.data.__get__: _get_data,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.share_memory_: _share_memory,
    **{
        getattr(Tensor, name): _of_values(name)
        for name in ("__dlpack__", "__dlpack_device__", "numpy", "__array__", "tolist")
    },
    **BY_CALLER,
    **BACKWARD_CALLS,
}
"""Torch functions of all FP8 types."""
