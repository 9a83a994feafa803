"""Define the ops that multiply tokens in groups by a stack of experts.

The rows of ``A[T, K]`` belong to groups, one after the other, which end at ``offs`` ``[E]`` (int32,
cumulative, on the device). Nothing here reads ``offs`` on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..formats import Quantized, group_columns, group_rows, padded_rows
from ..op import op, runner
from .choose_backend import GroupedProblem, choose_grouped
from .low_rank import RANK_STEP, is_fused


def _check(
    a: Quantized,
    b: Quantized,
    offs: Tensor | None,
    bias: Tensor | None,
    _: Any,
    tokens: int | None,
    left: Tensor | None,
    right: Tensor | None,
) -> None:
    checks.gemm_operands(a, b, bias, b_ndim=3)
    if offs is not None:
        checks.group_ends(offs, a.data, "operand a")
    fits = not isinstance(tokens, int) or tokens <= a.data.shape[0]  # symbolic: while tracing
    groups = 1 if offs is None else len(offs)
    checks.fit(groups == len(b.data), fits, (left is None) == (right is None))
    if left is not None and right is not None:
        rank = right.shape[-1]
        checks.fit(
            tuple(left.shape) == (a.data.shape[0] if tokens is None else tokens, rank),
            tuple(right.shape) == (*b.data.shape[:2], rank),
            rank % RANK_STEP == 0,
            left.device == right.device == a.data.device,
            left.is_contiguous() and right.is_contiguous(),
            is_fused(left.dtype, rank) and is_fused(right.dtype, rank),
        )


def _check_wgrad(a: Quantized, b: Quantized, offs: Tensor, tokens: int, out: torch.dtype) -> None:
    checks.gemm_operands(a, b)
    checks.group_ends(offs, a.data, "operand a")
    checks.fit(a.data.shape[1] == group_columns(tokens, offs.shape[0]))


def _decide_gemm(
    a: Quantized,
    b: Quantized,
    __: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tokens: int | None,
    left: Tensor | None,
    right: Tensor | None,
) -> Callable[..., Tensor]:
    (rows, k), (experts, n, _) = a.data.shape, b.data.shape
    if 0 in (rows, n) or tokens == 0:
        return _empty
    problem = GroupedProblem(
        "gemm",
        padded_rows(rows),
        n,
        k,
        experts,
        a.format,
        b.format,
        out_dtype,
        a.data.device,
        None if bias is None else bias.dtype,
        0 if left is None else left.shape[1],
    )
    run = runner(choose_grouped(problem).backend, "grouped_gemm")
    if b.data.is_contiguous():
        return run
    # rows of every matrix of a larger stack
    return lambda a, b, *rest: run(a, b._replace(data=b.data.contiguous()), *rest)


def _empty(
    a: Quantized,
    b: Quantized,
    _: Tensor | None,
    bias: Any,
    out_dtype: torch.dtype,
    tokens: int | None,
    *low_rank: Any,
) -> Tensor:
    rows = a.data.shape[0] if tokens is None else tokens
    return a.data.new_empty((rows, b.data.shape[1]), dtype=out_dtype)


def _shape(a: Quantized, b: Quantized, offs: Tensor) -> tuple[int, int, int]:
    """Return the shape of weight gradients, ``[E, N, K]``."""
    return offs.shape[0], a.data.shape[0], b.data.shape[0]


def _decide_wgrad(
    a: Quantized, b: Quantized, offs: Tensor, tokens: int, out_dtype: torch.dtype
) -> Callable[..., Tensor]:
    experts, n, k = shape = _shape(a, b, offs)
    if 0 in (*shape, tokens):
        return lambda a, *_: a.data.new_zeros(shape, dtype=out_dtype)
    problem = GroupedProblem(
        "wgrad", group_rows(tokens), n, k, experts, a.format, b.format, out_dtype, a.data.device
    )
    return runner(choose_grouped(problem).backend, "grouped_gemm_wgrad")


@op(
    decide=_decide_gemm,
    check=_check,
    flops=lambda a, b, offs, bias, dtype, tokens, left, right: (
        2
        * (a.data[0] if tokens is None else tokens)
        * b.data[1]
        * (b.data[2] + (0 if left is None else left[1]))
    ),
)
def grouped_gemm(
    a: Quantized,
    b: Quantized,
    offs: Tensor | None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    tokens: int | None = None,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Tensor:
    """Multiply the rows of group e of ``A[T, K]`` by ``B[e, N, K]^T (+ bias[e, N])``.

    The result is ``[T, N]``. Rows of no group, from ``offs[-1]`` on, are zeros. Without ``offs``
    one group has all rows. ``tokens``: T, if A is a cast in groups and has more rows. ``left`` and
    ``right``: contiguous bf16 ``[T, R]`` and ``[E, N, R]``, whose product is added; see
    ``low_rank.py`` for R. See :func:`blocktensor.ops.reference.grouped_gemm`.
    """
    return _empty(a, b, offs, bias, out_dtype, tokens)


@op(
    decide=_decide_wgrad,
    check=_check_wgrad,
    flops=lambda a, b, offs, tokens, *_: 2 * tokens * a.data[0] * b.data[0],
)
def grouped_gemm_wgrad(
    a: Quantized, b: Quantized, offs: Tensor, tokens: int, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Contract ``A[N, P] B[K, P]^T`` over the tokens of each group e, into ``out[E, N, K]``.

    Args:
        a, b: columnwise casts in groups (``quantize_grouped``).
        offs: int32 ``[E]``, the ends of the groups.
        tokens: rows of the matrices that were cast.
        out_dtype: of the output.
    """
    return a.data.new_empty(_shape(a, b, offs), dtype=out_dtype)
