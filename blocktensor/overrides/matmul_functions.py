"""Override the torch functions that multiply, above autograd: all call the FP8 linear layer.

``matmul(a, b)`` is ``linear(a, b.t())``, and ``a @ stack`` is
``grouped_linear(a, stack.mT, offs)``, since transposing an FP8 operand only swaps labels. A batched
matmul has groups of one size. Matmuls with ``out=``, ``out_dtype=`` or in-place addition call the
matmul that returns a new tensor. Functions without an FP8 path are refused. Arithmetic on the
values of weights, for example in optimizers and merges of adapters, runs in high precision
(``tensor/arithmetic.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd.any_linear import grouped_linear, linear
from ..autograd.linear import linear_override
from ..ops import checks
from ..tensor.adapted import AdaptedWeight, LowRank
from ..tensor.arithmetic import is_arithmetic
from ..tensor.base import FP8Base, readable
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.refusals import refuse_matmul
from ..tensor.weight import BlockwiseFP8Weight


def _named(names: str) -> list[Any]:
    """List torch's functions and tensor methods of these names that this version of torch has."""
    return [getattr(x, name) for x in (torch, Tensor) for name in names.split() if hasattr(x, name)]


_IN_PLACE = {
    getattr(Tensor, f"{name}_"): getattr(torch, name)
    for name in ("addmm", "baddbmm", "addbmm", "addmv")
}
"""Matmuls that are added in place, and the functions that return the sum instead."""

_ADDING = {*_IN_PLACE, *_named("addmm baddbmm addbmm addmv addr")}
"""Matmuls that are added to their first argument."""


def in_all_forms(func: Any, override: Callable[..., Any]) -> Callable[..., Any]:
    """Return the override of a matmul, with the options of ``func`` and arithmetic on weights.

    Args:
        func: a torch function.
        override: takes all arguments except ``out`` and ``out_dtype``, and returns a new tensor.
    """
    is_adding, in_place_of = func in _ADDING, _IN_PLACE.get(func)

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs and kwargs.get("out") is not None:
            return _into(func, args, **kwargs)
        if kwargs and kwargs.get("out_dtype") is not None:
            return _in_dtype(func, args, **kwargs)
        factors = _factors(is_adding, args, kwargs)
        if is_arithmetic(factors):
            masters, named = torch.utils._pytree.tree_map(readable, (args, kwargs))
            if in_place_of is not None:  # the output may be a weight
                return args[0].copy_(in_place_of(*masters, **named))
            return func(*masters, **named)
        if is_adding and not any(isinstance(x, FP8Base) for x in factors):  # the sum is a weight
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return override(*args, **kwargs)

    return run


def _factors(is_adding: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the factors of a matmul, without the added term (such as the base of a LoRA)."""
    if is_adding:
        args, kwargs = args[1:], {name: x for name, x in kwargs.items() if name != "input"}
    lists = [x if isinstance(x, (list, tuple)) else (x,) for x in (*args, *kwargs.values())]
    return [x for operands in lists for x in operands if isinstance(x, Tensor)]


def _into(func: Any, args: tuple[Any, ...], *, out: Tensor, **kwargs: Any) -> Tensor:
    """Compute ``func(..., out=out)``.

    Raises:
        RuntimeError: gradients are recorded, as in torch.
        ValueError: ``out`` has another dtype, or another shape and is not empty.
    """
    made: Tensor = func(*args, **kwargs)
    call = f"{getattr(func, '__name__', func)}(..., out=...)"
    if torch.is_grad_enabled() and (made.requires_grad or out.requires_grad):
        raise RuntimeError(
            f"{call} has no gradient, and one of its arguments requires one: use the result, or "
            f"run it under torch.no_grad()"
        )
    if out.dtype != made.dtype or (out.numel() and out.shape != made.shape):
        raise ValueError(
            f"{call} makes {made.dtype} {list(made.shape)}, and out is {out.dtype} "
            f"{list(out.shape)}: expected one of them, or an empty tensor of this dtype"
        )
    if out.shape != made.shape:
        out.resize_(made.shape)
    return out.copy_(made)


def _in_dtype(func: Any, args: tuple[Any, ...], *, out_dtype: torch.dtype, **kwargs: Any) -> Tensor:
    """Compute ``func(..., out_dtype=out_dtype)``: operands of this dtype have the same casts."""
    checks.given_dtype(out_dtype, "out_dtype")

    def converted(x: Any) -> Any:
        return x.to(out_dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    args, kwargs = torch.utils._pytree.tree_map(converted, (args, kwargs))
    made: Tensor = func(*args, **kwargs)
    return made


def _added_in_place(func: Any) -> Callable[..., Tensor]:
    def run(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.copy_(func(self, *args, **kwargs))

    return run


def plus(product: Tensor, term: Tensor, beta: Any, alpha: Any) -> Tensor:
    """Return ``beta * term + alpha * product``; ``beta=0`` ignores nan and inf in ``term``."""
    term = term.nan_to_num(0, 0, 0) if beta == 0 else term
    return product.mul(alpha).add(term, alpha=beta)


def is_weight(x: Tensor) -> bool:
    """Return True for an FP8 weight: trainable, frozen, or with adapters."""
    square = isinstance(x, BlockwiseFP8Tensor) and x.format.transposes
    return square or isinstance(x, (BlockwiseFP8Weight, AdaptedWeight))


def is_stack(x: Tensor) -> bool:
    """Return True for a stack of FP8 experts."""
    return x.ndim == 3 and is_weight(x)


def grouped_mm(
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Run ``torch._grouped_mm``, which ``F.grouped_mm`` calls."""
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
    """Run transformers' ``grouped_mm_fallback``, whose own backward is in high precision."""
    return grouped_mm(input, weight, offs.to(torch.int32))


def bmm(input: Tensor, mat2: Tensor, **_: None) -> Tensor:
    """Run ``torch.bmm`` with a stack on one side, and ``matmul`` of two batches."""
    return _bmm(input, mat2, None)


def _adapting(run: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``baddbmm`` of a frozen stack and two plain batches adapt the stack, not compute a sum.

    So adapters of frozen experts, ``w + alpha * b @ a``, need no memory of the size of ``w``. It is
    a torch function, which Dynamo does not trace into.
    """

    def adapt(input: Tensor, batch1: Tensor, batch2: Tensor, **how: Any) -> Any:
        is_sum = how.keys() - {"alpha"} or any(isinstance(x, FP8Base) for x in (batch1, batch2))
        if is_sum or not is_stack(input) or isinstance(input, BlockwiseFP8Weight):
            return run(input, batch1, batch2, **how)
        term = LowRank(batch1, batch2, how.get("alpha", 1))
        if isinstance(input, AdaptedWeight):
            return AdaptedWeight(input.base, [*input.terms, term])
        return AdaptedWeight(input, [term])

    return adapt


def baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1, **_: None
) -> Tensor:
    """Run ``torch.baddbmm``; one row ``[E, 1, N]`` with factor 1 is added as a bias."""
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
        f"a batched matmul of {_described(a)} by {_described(b)} has no FP8 path: one operand "
        f"must be a stack of FP8 experts [E, K, N], the other a batch [E, T, K] in high precision; "
        f"call .dequantize(), or .high_precision() of a BlockwiseFP8Weight, to compute in high "
        f"precision"
    )


def _described(x: Tensor) -> str:
    return f"{type(x).__name__} {list(x.shape)}"


TRANSFORMERS_FALLBACK = "transformers.grouped_mm_fallback"
"""The op by which transformers multiplies experts if it does not call torch's. It goes by its name,
since it exists only after an import of transformers."""


def _matmul_override(input: Tensor, other: Tensor, **_: None) -> Tensor:
    if other.ndim == 2 and not is_weight(input):
        return linear(input, other.t())
    if input.ndim == other.ndim == 3:
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


def _no_fp8_path(name: str) -> Callable[..., Any]:
    return lambda *_, **__: refuse_matmul(name)


_MATMULS_WITHOUT_FP8 = {
    torch: "einsum tensordot inner addbmm addmv dot vdot chain_matmul bilinear matrix_power "
    "svd_lowrank pca_lowrank cdist cov corrcoef conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d",
    F: "bilinear conv1d conv2d conv3d multi_head_attention_forward scaled_dot_product_attention",
    torch.linalg: "matmul multi_dot vecdot matrix_power",
    torch.sparse: "mm addmm",
    Tensor: "inner addbmm addmv dot vdot matrix_power",
}

_OVERRIDES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_named("mm mv matmul __matmul__"), _matmul_override),
    Tensor.__rmatmul__: _rmatmul_override,
    **dict.fromkeys(_named("addmm"), _addmm_override),
    **dict.fromkeys(_named("bmm"), bmm),
    **dict.fromkeys(_named("baddbmm"), baddbmm),
    **{in_place: _added_in_place(func) for in_place, func in _IN_PLACE.items()},
    **{
        getattr(namespace, name): _no_fp8_path(name)
        for namespace, names in _MATMULS_WITHOUT_FP8.items()
        for name in names.split()
        if hasattr(namespace, name)  # torch versions differ
    },
}

MATMULS: dict[Any, Callable[..., Any]] = {
    F.linear: linear_override,
    **{func: in_all_forms(func, override) for func, override in _OVERRIDES.items()},
    **{func: _adapting(in_all_forms(func, baddbmm)) for func in _named("baddbmm")},
    torch._grouped_mm: grouped_mm,
    TRANSFORMERS_FALLBACK: grouped_mm_fallback,
}
"""The torch functions that multiply, for all FP8 types."""
