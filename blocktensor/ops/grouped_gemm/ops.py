"""Products of tokens in groups with a stack of experts, decided once for each kind of call.

The rows of ``A[T, K]`` belong to groups, one after the other, which end at ``offs`` ``[E]`` (int32,
cumulative, on the device). Nothing here reads ``offs`` on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import checks
from ..formats import Quantized, group_columns
from ..gemm.ops import OPERANDS, arguments_of, operands_of
from ..registry import loaded
from ..runtime.specialize import Specialized, recorded
from .choose_backend import GroupedKernels, GroupedProblem, choose_grouped


def grouped_gemm(
    a: Quantized,
    b: Quantized,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``out[T, N]``: the rows of group e of ``A[T, K]`` by ``B[e, N, K]^T (+ bias[e, N])``.

    Rows of no group, from ``offs[-1]`` on, are zeros. See
    :func:`blocktensor.ops.reference.grouped_gemm`.

    Raises:
        TypeError, ValueError: dtypes, shapes, layouts or devices that do not fit together.
    """
    return _gemm(a, b, offs, bias, out_dtype)


def grouped_gemm_wgrad(
    a: Quantized, b: Quantized, offs: Tensor, tokens: int, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """``out[E, N, K]``: the tokens of group e of ``A[N, P] B[K, P]^T``, contracted.

    Args:
        a, b: columnwise casts in groups (``quantize_grouped_columnwise``).
        offs: int32 ``[E]``, the ends of the groups.
        tokens: rows of the matrices that were cast.
        out_dtype: of the output.

    Raises:
        TypeError, ValueError: as :func:`grouped_gemm`.
    """
    return _wgrad(a, b, offs, tokens, out_dtype)


def grouped_gemm_wgrad_add_(
    out: Tensor, a: Quantized, b: Quantized, offs: Tensor, tokens: int
) -> Tensor:
    """``out[E, N, K] +=`` :func:`grouped_gemm_wgrad`, in fp32 and in place; returns ``out``.

    Raises:
        TypeError, ValueError: as :func:`grouped_gemm`, and unless ``out`` is fp32 and contiguous.
    """
    _wgrad_add_(out, a, b, offs, tokens)
    return out


def _check_common(a: Quantized, b: Quantized, offs: Tensor) -> None:
    checks.group_ends(offs, a.data, "operand a")
    checks.same_contraction(a.data, b.data)
    checks.same_device(a.data, b.data, "operand a", "operand b")


def _check(
    a: Quantized, b: Quantized, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> None:
    checks.gemm_operand(a, "operand a")
    checks.gemm_operand(b, "operand b", ndim=3)
    _check_common(a, b, offs)
    checks.gemm_output(out_dtype)
    experts, n, _ = b.data.shape
    if offs.shape[0] != experts:
        raise ValueError(
            f"offs ends {offs.shape[0]} groups, and operand b {list(b.data.shape)} is a stack of "
            f"{experts}: expected one end for each"
        )
    if bias is not None:
        checks.same_device(a.data, bias, "operand a", "the bias")
        if tuple(bias.shape) != (experts, n):
            raise ValueError(f"the bias has shape {list(bias.shape)}: expected [{experts}, {n}]")


def _check_wgrad(a: Quantized, b: Quantized, offs: Tensor, tokens: int, out: torch.dtype) -> None:
    checks.gemm_operand(a, "operand a")
    checks.gemm_operand(b, "operand b")
    _check_common(a, b, offs)
    checks.gemm_output(out)
    bound = group_columns(tokens, offs.shape[0])
    if a.data.shape[1] != bound:
        raise ValueError(
            f"operands contract {a.data.shape[1]} columns: expected {bound}, those of {tokens} "
            f"tokens cast in {offs.shape[0]} groups by quantize_grouped_columnwise"
        )


def _check_sum(out: Tensor, a: Quantized, b: Quantized, offs: Tensor, tokens: int) -> None:
    _check_wgrad(a, b, offs, tokens, torch.float32)
    checks.same_device(a.data, out, "operand a", "the output")
    if out.dtype != torch.float32:
        raise TypeError(f"grouped_gemm_wgrad_add_ adds into torch.float32, got {out.dtype}")
    expected = (offs.shape[0], a.data.shape[0], b.data.shape[0])
    if tuple(out.shape) != expected or not out.is_contiguous():
        raise ValueError(
            f"grouped_gemm_wgrad_add_ needs a contiguous output {list(expected)}, got "
            f"{list(out.shape)} with strides {out.stride()}"
        )


def _decide_gemm(
    a: Quantized, b: Quantized, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Callable[..., Tensor]:
    _check(a, b, offs, bias, out_dtype)
    (rows, k), (experts, n, _) = a.data.shape, b.data.shape
    if 0 in (rows, n):
        return lambda a, *_: a.data.new_empty((rows, n), dtype=out_dtype)
    problem = GroupedProblem(
        "gemm", rows, n, k, experts, a.format, b.format, out_dtype, a.data.device,
        None if bias is None else bias.dtype,
    )  # fmt: skip
    kernels = _kernels_for(problem)
    return recorded(kernels.grouped_gemm, kernels.launches)


def _wgrad_problem(
    a: Quantized, b: Quantized, offs: Tensor, tokens: int, out: torch.dtype, accumulate: bool
) -> GroupedProblem:
    n, k = a.data.shape[0], b.data.shape[0]
    return GroupedProblem(
        "wgrad", tokens, n, k, offs.shape[0], a.format, b.format, out, a.data.device, None,
        accumulate,
    )  # fmt: skip


def _decide_wgrad(
    a: Quantized, b: Quantized, offs: Tensor, tokens: int, out_dtype: torch.dtype
) -> Callable[..., Tensor]:
    _check_wgrad(a, b, offs, tokens, out_dtype)
    shape = offs.shape[0], a.data.shape[0], b.data.shape[0]
    if tokens == 0 or 0 in shape:
        return lambda a, *_: a.data.new_zeros(shape, dtype=out_dtype)
    kernels = _kernels_for(_wgrad_problem(a, b, offs, tokens, out_dtype, False))
    return recorded(kernels.grouped_gemm_wgrad, kernels.launches)


def _decide_sum(
    out: Tensor, a: Quantized, b: Quantized, offs: Tensor, tokens: int
) -> Callable[..., None]:
    _check_sum(out, a, b, offs, tokens)
    if 0 in (*out.shape, tokens):
        return lambda *_: None
    kernels = _kernels_for(_wgrad_problem(a, b, offs, tokens, out.dtype, True))
    return recorded(kernels.grouped_gemm_wgrad_add_, kernels.launches)


def _kernels_for(problem: GroupedProblem) -> GroupedKernels:
    return loaded(choose_grouped(problem).backend)


def _dispatch_gemm(
    a: Quantized, b: Quantized, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    _check(a, b, offs, bias, out_dtype)
    return _gemm_op(*arguments_of(a, b), offs, bias, out_dtype)


def _dispatch_wgrad(
    a: Quantized, b: Quantized, offs: Tensor, tokens: int, out_dtype: torch.dtype
) -> Tensor:
    _check_wgrad(a, b, offs, tokens, out_dtype)
    return _wgrad_op(*arguments_of(a, b), offs, tokens, out_dtype)


def _dispatch_sum(out: Tensor, a: Quantized, b: Quantized, offs: Tensor, tokens: int) -> None:
    _check_sum(out, a, b, offs, tokens)
    _wgrad_add_op(out, *arguments_of(a, b), offs, tokens)


_gemm = Specialized(_decide_gemm, _dispatch_gemm)
_wgrad = Specialized(_decide_wgrad, _dispatch_wgrad)
_wgrad_add_ = Specialized(_decide_sum, _dispatch_sum)


def _gemm_body(*args: Any) -> Tensor:
    *operands, offs, bias, out_dtype = args
    return _gemm.run(*operands_of(*operands), offs, bias, out_dtype)


def _wgrad_body(*args: Any) -> Tensor:
    *operands, offs, tokens, out_dtype = args
    return _wgrad.run(*operands_of(*operands), offs, tokens, out_dtype)


def _wgrad_add_body(out: Tensor, *args: Any) -> None:
    *operands, offs, tokens = args
    _wgrad_add_.run(out, *operands_of(*operands), offs, tokens)


_gemm_op = torch.library.custom_op(
    "blocktensor::grouped_gemm",
    _gemm_body,
    mutates_args=(),
    schema=f"({OPERANDS}, Tensor offs, Tensor? bias, ScalarType out_dtype) -> Tensor",
)
_wgrad_op = torch.library.custom_op(
    "blocktensor::grouped_gemm_wgrad",
    _wgrad_body,
    mutates_args=(),
    schema=f"({OPERANDS}, Tensor offs, SymInt tokens, ScalarType out_dtype) -> Tensor",
)
_wgrad_add_op = torch.library.custom_op(
    "blocktensor::grouped_gemm_wgrad_add_",
    _wgrad_add_body,
    mutates_args=("out",),
    schema=f"(Tensor(a!) out, {OPERANDS}, Tensor offs, SymInt tokens) -> ()",
)


@_gemm_op.register_fake
def _(*args: Any) -> Tensor:
    *operands, _, _, out_dtype = args
    a, b = operands_of(*operands)
    shape = a.data.shape[0], b.data.shape[1]
    return torch.empty(shape, dtype=out_dtype, device=a.data.device)


@_wgrad_op.register_fake
def _(*args: Any) -> Tensor:
    *operands, offs, _, out_dtype = args
    a, b = operands_of(*operands)
    shape = offs.shape[0], a.data.shape[0], b.data.shape[0]
    return torch.empty(shape, dtype=out_dtype, device=a.data.device)


@_wgrad_add_op.register_fake
def _(out: Tensor, *args: Any) -> None:
    return None


@register_flop_formula(torch.ops.blocktensor.grouped_gemm)
def _gemm_flops(a_shape: Any, a_scale: Any, _: str, b_shape: Any, *__: Any, **___: Any) -> int:
    return 2 * a_shape[0] * b_shape[1] * b_shape[2]


@register_flop_formula(torch.ops.blocktensor.grouped_gemm_wgrad)
def _wgrad_flops(*args: Any, **__: Any) -> int:
    a_shape, _a_scale, _a, b_shape, _b_scale, _b, _offs, tokens, *_ = args
    return 2 * tokens * a_shape[0] * b_shape[0]


@register_flop_formula(torch.ops.blocktensor.grouped_gemm_wgrad_add_)
def _wgrad_add_flops(out: Any, *args: Any, **__: Any) -> int:
    return _wgrad_flops(*args)
