"""The torch functions that the FP8 types override, above autograd.

Products lead to the FP8 linear: ``matmul(a, b)`` is ``linear(a, b.t())``, since t() of an FP8
operand is a relabelling. Products without an FP8 path are refused. All other functions reach
``tensor/aten_*.py``, below autograd.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distributed.fsdp.begin_shard import chunks
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .linear import linear


def _linear_override(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if isinstance(input, BlockwiseFP8Weight):
        input = input.master
    return linear(input, weight, bias)


def _matmul_override(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    if out is not None:
        raise NotImplementedError("FP8 products return a new tensor: out= is not supported")
    if other.ndim == 2 and not _is_weight(input):
        return linear(input, other.t())
    if input.ndim == 2 and other.ndim == 2:  # a weight on the left: (bᵀ wᵀ)ᵀ
        return linear(other.t(), input).t()
    raise NotImplementedError(
        f"matmul of {list(input.shape)} by {list(other.shape)} has no FP8 path: the right operand "
        f"must be a matrix [K, N] (stacks of experts need grouped_mm); call .dequantize(), or use "
        f".master of a BlockwiseFP8Weight, to compute in high precision"
    )


def _is_weight(x: Tensor) -> bool:
    square = isinstance(x, BlockwiseFP8Tensor) and x.format.transposes
    return square or isinstance(x, BlockwiseFP8Weight)


def _rmatmul_override(self: Tensor, other: Tensor) -> Tensor:
    return _matmul_override(other, self)


def _addmm_override(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Any = None
) -> Tensor:
    as_bias = input.ndim == 1 and beta == 1 and alpha == 1
    if as_bias and out is None and not _is_weight(mat1):
        return linear(mat1, mat2.t(), input)
    product = _matmul_override(mat1, mat2, out=out)
    return product.mul(alpha).add(input, alpha=beta)


def _get_data(tensor: Tensor) -> Tensor:
    # detach() shares the version counter, which .data does not: writes through it are noticed
    return tensor.detach()


def _set_data(tensor: Tensor, new: Tensor) -> None:
    same = (tensor.shape, tensor.dtype, tensor.device) == (new.shape, new.dtype, new.device)
    if not (isinstance(tensor, BlockwiseFP8Weight) and same):
        raise NotImplementedError(
            f"cannot set .data of {tensor!r} to a tensor of shape {list(new.shape)}, {new.dtype} "
            f"on {new.device}: use .copy_(), or torch.utils.swap_tensors to change the type"
        )
    tensor.replace_master(new.master if isinstance(new, BlockwiseFP8Weight) else new.detach())


def _share_memory(tensor: BlockwiseFP8Tensor | BlockwiseFP8Weight) -> Tensor:
    # torch's own would look for the storage of the wrapper, which has none
    with torch._C.DisableTorchFunctionSubclass():
        for name in tensor.__tensor_flatten__()[0]:
            getattr(tensor, name).share_memory_()
    return tensor


def _no_memory(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    # the wrapper's pointer is null: a read through it would crash
    raise NotImplementedError(
        f"a {type(tensor).__name__} has no memory of its own to hand out: use .master of a "
        f"BlockwiseFP8Weight, .rowwise_data and .rowwise_scale of a BlockwiseFP8Tensor"
    )


def _called_by(module: str) -> bool:
    """Whether the overridden torch function was called in ``module``."""
    # three frames up: the override, __torch_function__, the caller of the function
    return sys._getframe(3).f_globals.get("__name__") == module


def _chunk(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    sharding = "torch.distributed.fsdp._fully_shard._fsdp_common"
    if isinstance(input, BlockwiseFP8Tensor) and _called_by(sharding):
        return chunks(input, *args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return torch.chunk(input, *args, **kwargs)


def _flatten(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if _called_by("torch.distributed.fsdp._flat_param"):
        raise NotImplementedError(
            f"FullyShardedDataParallel (FSDP1) copies parameters into one flat plain tensor, and a "
            f"{type(input).__name__} would silently compute in high precision: shard the converted "
            f"model with torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return torch.flatten(input, *args, **kwargs)


def _no_fp8_path(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{name} has no FP8 path, and computing it in high precision would be silent: use "
            f"F.linear, torch.mm, torch.matmul or torch.addmm; or say so on purpose with .master "
            f"of a BlockwiseFP8Weight, .dequantize() of a BlockwiseFP8Tensor"
        )

    return refuse


_PRODUCTS_WITHOUT_FP8 = {
    torch: "einsum tensordot inner bmm baddbmm addbmm mv addmv dot vdot chain_matmul bilinear "
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d _grouped_mm",
    F: "bilinear conv1d conv2d conv3d grouped_mm multi_head_attention_forward "
    "scaled_dot_product_attention",
    torch.linalg: "matmul multi_dot vecdot",
    torch.sparse: "mm addmm",
    Tensor: "inner bmm baddbmm addbmm mv addmv dot vdot addmm_ addmv_ baddbmm_ addbmm_",
}

OVERRIDES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear_override,
    torch.mm: _matmul_override,
    Tensor.mm: _matmul_override,
    torch.matmul: _matmul_override,
    Tensor.matmul: _matmul_override,
    Tensor.__matmul__: _matmul_override,
    Tensor.__rmatmul__: _rmatmul_override,
    torch.addmm: _addmm_override,
    Tensor.addmm: _addmm_override,
    Tensor.data.__get__: _get_data,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.share_memory_: _share_memory,
    Tensor.__dlpack__: _no_memory,
    Tensor.__dlpack_device__: _no_memory,
    torch.chunk: _chunk,
    torch.flatten: _flatten,
    **{
        getattr(namespace, name): _no_fp8_path(name)
        for namespace, names in _PRODUCTS_WITHOUT_FP8.items()
        for name in names.split()
        if hasattr(namespace, name)  # torch versions differ
    },
}
"""Torch functions of all FP8 types."""
