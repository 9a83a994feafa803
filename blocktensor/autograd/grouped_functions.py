"""The torch functions of grouped and batched products with a stack of FP8 experts, above autograd.

All lead to the grouped linear: ``a @ stack`` is ``grouped_linear(a, stack.mT, offs)``, since the
transpose of an FP8 stack is a relabelling. Batched products are those of groups of equal size.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .linear import grouped_linear
from .product_calls import plus


def is_weight(x: Tensor) -> bool:
    """Whether ``x`` is an FP8 weight, or one that is frozen."""
    square = isinstance(x, BlockwiseFP8Tensor) and x.format.transposes
    return square or isinstance(x, BlockwiseFP8Weight)


def is_stack(x: Tensor) -> bool:
    """Whether ``x`` is a stack of FP8 experts."""
    return x.ndim == 3 and is_weight(x)


def grouped_mm(
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``torch._grouped_mm``, to which ``F.grouped_mm`` comes down."""
    if input.ndim != 2 or not is_stack(mat2):
        raise NotImplementedError(
            f"grouped_mm of {_described(input)} by {_described(mat2)} has no FP8 path: the left "
            f"operand must be tokens [T, K] in groups, the right one a stack of FP8 experts "
            f"[E, K, N]; torch.bmm multiplies stacks [E, T, K]. Call .dequantize(), or "
            f".high_precision() of a BlockwiseFP8Weight, to compute in high precision"
        )
    if offs is None:
        raise ValueError(
            f"grouped_mm of {list(input.shape)} by {list(mat2.shape)} needs offs: int32 "
            f"[{len(mat2)}], the cumulative end of each group of rows"
        )
    if out_dtype is not None and out_dtype != input.dtype:
        raise NotImplementedError(
            f"grouped_mm with out_dtype {out_dtype} for an input of {input.dtype}: convert the "
            f"result, or run under torch.autocast"
        )
    return grouped_linear(input, mat2.transpose(1, 2), offs, bias)


def grouped_mm_fallback(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """``torch.ops.transformers.grouped_mm_fallback``, whose own backward is in high precision."""
    return grouped_mm(input, weight, offs.to(torch.int32))


def bmm(input: Tensor, mat2: Tensor, **_: None) -> Tensor:
    """``torch.bmm`` with a stack on one side, and ``matmul`` of two batches."""
    return _bmm(input, mat2, None)


def baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1, **_: None
) -> Tensor:
    """``torch.baddbmm``; one row ``[E, 1, N]`` that is added as it is joins the product."""
    as_bias = is_stack(batch2) and input.shape == (len(batch2), 1, batch2.shape[2])
    if as_bias and beta == 1 and alpha == 1:
        return _bmm(batch1, batch2, input.squeeze(1))
    return plus(_bmm(batch1, batch2, None), input, beta, alpha)


def _bmm(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if a.ndim != 3 or b.ndim != 3 or is_stack(a) == is_stack(b):
        _refuse(a, b)
    if is_stack(a):  # a stack on the left: (bᵀ aᵀ)ᵀ
        return _bmm(b.transpose(1, 2), a.transpose(1, 2), None).transpose(1, 2)
    (experts, tokens, k), n = a.shape, b.shape[2]
    if b.shape[:2] != (experts, k):
        raise ValueError(
            f"cannot multiply the batch {list(a.shape)} by the stack {list(b.shape)}: expected "
            f"[E, T, K] by [E, K, N]"
        )
    offs = torch.arange(1, experts + 1, dtype=torch.int32, device=a.device) * tokens
    rows = a.reshape(experts * tokens, k)
    return grouped_linear(rows, b.transpose(1, 2), offs, bias).view(experts, tokens, n)


def _refuse(a: Tensor, b: Tensor) -> NoReturn:
    raise NotImplementedError(
        f"a batched product of {_described(a)} by {_described(b)} has no FP8 path: one operand "
        f"must be a stack of FP8 experts [E, K, N], the other a batch [E, T, K] in high precision; "
        f"call .dequantize(), or .high_precision() of a BlockwiseFP8Weight, to compute in high "
        f"precision"
    )


def _described(x: Tensor) -> str:
    return f"{type(x).__name__} {list(x.shape)}"


TRANSFORMERS_FALLBACK = "transformers.grouped_mm_fallback"
"""The op by which transformers multiplies experts where it does not call torch's; by its name,
since the op exists only once that library is imported."""
