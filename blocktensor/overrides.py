"""What torch functions do on the two FP8 types, above autograd.

Products lead to the FP8 linear: ``matmul(a, b)`` is ``linear(a, b.t())``, since t() of an FP8
operand is a relabelling. Products without an FP8 path are refused. All else falls through to
``dispatch.py``, below autograd.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import linear
from .distributed.frozen import chunks
from .ops.layouts import SQUARE_BLOCK
from .tensor import TORCH_FUNCTIONS, BlockwiseFP8Tensor
from .weight import BlockwiseFP8Weight


def _overrides(*functions: Any) -> Callable[[Any], Any]:
    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            TORCH_FUNCTIONS[function] = implementation
        return implementation

    return register


@_overrides(F.linear)
def _linear_override(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if isinstance(input, BlockwiseFP8Weight):
        input = input.master
    return linear(input, weight, bias)


@_overrides(torch.mm, Tensor.mm, torch.matmul, Tensor.matmul, Tensor.__matmul__)
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
    square = isinstance(x, BlockwiseFP8Tensor) and x.block_shape == SQUARE_BLOCK
    return square or isinstance(x, BlockwiseFP8Weight)


@_overrides(Tensor.__rmatmul__)
def _rmatmul_override(self: Tensor, other: Tensor) -> Tensor:
    return _matmul_override(other, self)


@_overrides(torch.addmm, Tensor.addmm)
def _addmm_override(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Any = None
) -> Tensor:
    as_bias = input.ndim == 1 and beta == 1 and alpha == 1
    if as_bias and out is None and not _is_weight(mat1):
        return linear(mat1, mat2.t(), input)
    product = _matmul_override(mat1, mat2, out=out)
    return product.mul(alpha).add(input, alpha=beta)


@_overrides(Tensor.data.__get__)  # type: ignore[attr-defined]
def _get_data(tensor: Tensor) -> Tensor:
    # detach() shares the version counter, which .data does not: writes through it are noticed
    return tensor.detach()


@_overrides(Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(tensor: Tensor, new: Tensor) -> None:
    same = (tensor.shape, tensor.dtype, tensor.device) == (new.shape, new.dtype, new.device)
    if not (isinstance(tensor, BlockwiseFP8Weight) and same):
        raise NotImplementedError(
            f"cannot set .data of {tensor!r} to a tensor of shape {list(new.shape)}, {new.dtype} "
            f"on {new.device}: use .copy_(), or torch.utils.swap_tensors to change the type"
        )
    tensor.replace_master(new.master if isinstance(new, BlockwiseFP8Weight) else new.detach())


@_overrides(Tensor.share_memory_)
def _share_memory(tensor: BlockwiseFP8Tensor | BlockwiseFP8Weight) -> Tensor:
    # torch's own would look for the storage of the wrapper, which has none
    with torch._C.DisableTorchFunctionSubclass():
        for name in tensor.__tensor_flatten__()[0]:
            getattr(tensor, name).share_memory_()
    return tensor


@_overrides(Tensor.__dlpack__, Tensor.__dlpack_device__)
def _no_memory(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    # the wrapper's pointer is null: who read through it would crash
    raise NotImplementedError(
        f"a {type(tensor).__name__} has no memory of its own to hand out: use .master of a "
        f"BlockwiseFP8Weight, .rowwise_data and .rowwise_scale of a BlockwiseFP8Tensor"
    )


def _called_by(module: str) -> bool:
    """Whether the torch function that is overridden was called in ``module``."""
    # up: the override, __torch_function__, whoever called the function
    return sys._getframe(3).f_globals.get("__name__") == module


@_overrides(torch.chunk)
def _chunk(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    sharding = "torch.distributed.fsdp._fully_shard._fsdp_common"
    if isinstance(input, BlockwiseFP8Tensor) and _called_by(sharding):
        return chunks(input, *args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return torch.chunk(input, *args, **kwargs)


@_overrides(torch.flatten)
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
for _namespace, _names in _PRODUCTS_WITHOUT_FP8.items():
    for _name in _names.split():
        if hasattr(_namespace, _name):
            TORCH_FUNCTIONS[getattr(_namespace, _name)] = _no_fp8_path(_name)
