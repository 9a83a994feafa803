"""The differentiable grouped linear: rows of group e by expert e; fprop, dgrad and wgrad in FP8.

::

    fprop  y[T, N]      = x[T, K] · w[e]ᵀ    x.rowwise     w.rowwise       1x128 · 128x128
    dgrad  dx[T, K]     = g[T, N] · w[e]     g.rowwise     w.columnwise    1x128 · 128x128
    wgrad  dw[e, N, K]  = gᵀ · x of group e  g.columnwise  x.columnwise    1x128 · 1x128, or
                                                                           1x128 · 128x128

Groups are rows one after the other that end at ``offs`` ``[E]``, on the device; nothing here reads
it on the host. The columnwise blocks of x and g begin anew in every group. Rows of no group, from
``offs[-1]`` on, are zeros in y and dx, and reach nothing whatever they hold.

Saved for backward: the FP8 columnwise form of x, or x itself for a gradient in high precision (both
as in ``linear.py``), ``offs``, and the weight (``saved_weight.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.cast.grouped_ops import quantize_grouped, quantize_grouped_columnwise
from ..ops.cast.ops import quantize_rowwise
from ..ops.cast.producer import Forms
from ..ops.formats import BlockFormat, Quantized
from ..ops.grouped_gemm.ops import grouped_gemm, grouped_gemm_wgrad, grouped_gemm_wgrad_add_
from ..recipe import Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from . import saved_weight
from .backward import FP8Function, Gradients, run_backward
from .check_operands import refuse_prepared
from .grouped_plan import GroupedPlan, plan_grouped
from .high_precision import grouped_wgrad
from .linear import read_weight
from .main_grad import where_to_add
from .no_experts import is_of_no_experts, of_no_experts
from .shared_cast import this_thread
from .split_backward import in_place_of_added


def grouped_linear(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | None = None,
) -> Tensor:
    """:func:`blocktensor.functional.grouped_linear` with one weight.

    Args:
        x: ``[T, K]`` bf16, fp16 or fp32, or a 1x128 BlockwiseFP8Tensor, rowwise alone if w needs
            a gradient.
        w: ``[E, N, K]``: BlockwiseFP8Weight, BlockwiseFP8Tensor, or a plain tensor, which is cast.
        offs: int32 ``[E]``, the cumulative ends of the groups.
        bias: ``[E, N]``, added in fp32 before the one rounding of the output.
        recipe: for plain ``x`` and ``w``; default: the recipe of the operand that has one.
    """
    with torch._C.DisableTorchFunctionSubclass():
        x = _as_input(x)
        if is_of_no_experts(x, w, offs):
            return of_no_experts(x, w, bias)
        plan = plan_grouped(x, w, offs, bias, recipe)
        cast: tuple[Tensor, ...] = ()
        running = this_thread.running
        is_cast = isinstance(x, BlockwiseFP8Tensor) and plan.x_columnwise is None
        if running is not None and not is_cast:
            cast = running.forms_of(x, w, offs, plan, functools.partial(_cast, offs))
        return _apply(x.to(plan.out_dtype) if plan.casts_x else x, w, offs, bias, plan, cast)


def grouped_linears(
    x: Tensor,
    ws: Sequence[Tensor],
    offs: Tensor,
    biases: Sequence[Tensor | None],
    recipe: Recipe | None = None,
) -> tuple[Tensor, ...]:
    """:func:`grouped_linear` of one input by each weight; x is cast once for all of them."""
    with torch._C.DisableTorchFunctionSubclass():
        x = _as_input(x)
        if all(is_of_no_experts(x, w, offs) for w in ws):
            return tuple(of_no_experts(x, w, b) for w, b in zip(ws, biases, strict=True))
        plans = [plan_grouped(x, w, offs, b, recipe) for w, b in zip(ws, biases, strict=True)]
        first = plans[0]
        with_columnwise = first
        for plan in plans:
            if plan.format is not first.format:
                raise ValueError(
                    f"weights of one input were cast in {first.format.name} and "
                    f"{plan.format.name} blocks: give them one recipe, or call "
                    f"grouped_linear(x, w, offs) for each"
                )
            if plan.wgrad_input != first.wgrad_input:
                raise ValueError(
                    f"weights of one input have wgrad_input={first.wgrad_input!r} and "
                    f"{plan.wgrad_input!r}: give them one recipe, or call "
                    f"grouped_linear(x, w, offs) for each"
                )
            if plan.x_columnwise is not None:
                with_columnwise = plan
        if first.casts_x:
            x = x.to(first.out_dtype)
        cast = _cast(offs, with_columnwise, x.detach())
        return tuple(
            _apply(x, w, offs, b, plan, cast) for w, b, plan in zip(ws, biases, plans, strict=True)
        )


def _cast(offs: Tensor, plan: GroupedPlan, x: Tensor) -> tuple[Tensor, ...]:
    """Data and scale of the rowwise form of x and, if the plan has one, of its columnwise one."""
    row, col = input_forms(x, offs, plan.format, plan.x_columnwise)
    return *row[:2], *(col[:2] if col is not None else ())


def _as_input(x: Tensor) -> Tensor:
    if type(x) is BlockwiseFP8Tensor:
        refuse_prepared(x)
    return x.high_precision() if type(x) is BlockwiseFP8Weight else x


def _apply(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    plan: GroupedPlan,
    cast: tuple[Tensor, ...] = (),
) -> Tensor:
    """The grouped linear of this plan; ``cast``: data and scale of the forms of x, if made."""
    apply = _GroupedLinear.apply if plan.tracing else _apply_eagerly
    y: Tensor = apply(x, w, offs, bias, plan, *cast)
    return y


def input_forms(
    x: Tensor, offs: Tensor, rowwise: BlockFormat, columnwise: BlockFormat | None
) -> tuple[Quantized, Quantized | None]:
    """The forms of x that products read.

    Rows that are FP8 already, as ``all_to_all_fp8`` returns them, have no columnwise form, whose
    blocks lie along the tokens of a group: it is cast from their values, which rounds them again.
    """
    if isinstance(x, BlockwiseFP8Tensor):
        if columnwise is None:
            return x.rowwise(), None
        return x.rowwise(), quantize_grouped_columnwise(x.dequantize(), offs, columnwise)
    row, col = forms_of(x, offs, rowwise, columnwise)
    assert row is not None
    return row, col


def forms_of(
    x: Tensor, offs: Tensor, rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> Forms:
    """The forms of an activation or gradient ``[T, ...]``, cast now unless it is FP8 already."""
    if isinstance(x, BlockwiseFP8Tensor):
        if columnwise:
            raise NotImplementedError(
                "a gradient of a grouped FP8 linear that is FP8 already: its columnwise blocks, "
                "which the gradient of the weight needs, ignore the groups; pass it in high "
                "precision (.dequantize())"
            )
        return x.rowwise() if rowwise else None, None
    if rowwise is not None and columnwise is not None:
        return quantize_grouped(x, offs, rowwise, columnwise_format=columnwise)
    return (
        None if rowwise is None else quantize_rowwise(x, rowwise),
        None if columnwise is None else quantize_grouped_columnwise(x, offs, columnwise),
    )


class _GroupedLinear(FP8Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        offs: Tensor,
        bias: Tensor | None,
        plan: GroupedPlan,
        *cast: Tensor,
    ) -> Tensor:
        ctx.plan, ctx.casts = plan, len(cast)
        w_row, w_saved = read_weight(ctx, w, plan)
        if cast:
            x_row = Quantized(cast[0], cast[1], plan.format)
            columnwise = plan.x_columnwise
            x_col = None if columnwise is None else Quantized(cast[2], cast[3], columnwise)
        else:
            x_row, x_col = input_forms(x, offs, plan.format, plan.x_columnwise)
        y = grouped_gemm(x_row, w_row, offs, bias, plan.out_dtype)
        x_saved: Sequence[Tensor | None] = (None, None) if x_col is None else x_col[:2]
        if plan.saves_x:
            x_saved = x, None
        ctx.save_for_backward(offs, *x_saved, *(w_saved if plan.needs[0] else ()))
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return run_backward(
            ctx, grads, _gradients, (True, True, True, ctx.plan.bias_dtype is not None)
        )


def _gradients(ctx: Any, saved: Sequence[Tensor], grads: list[Any], asked: list[bool]) -> Gradients:
    """The gradients of the arguments of :meth:`_GroupedLinear.forward`."""
    plan: GroupedPlan = ctx.plan
    grad: Tensor | None = grads.pop()
    needs_dx, needs_dw, _, needs_dbias = asked
    offs, x_data, x_scale, *weight = saved
    dx = dw = dbias = None
    rest = (None,) * (1 + ctx.casts)
    if needs_dbias and grad is not None:
        dbias = sum_groups(grad, offs).to(plan.bias_dtype)
    if not (needs_dx or needs_dw):
        return dx, dw, None, dbias, *rest

    main_grad = None if ctx.cache is None else ctx.cache.main_grad
    if main_grad is not None and needs_dw:
        main_grad = where_to_add(ctx, main_grad)
    g = None
    if grad is not None:
        row, col = plan.grad_formats
        g = forms_of(grad, offs, row if needs_dx else None, col if needs_dw else None)
        if not plan.saves_x:
            del grad  # its forms are enough
    w_col = saved_weight.read_in_backward(ctx, weight, needs_dx and g is not None)
    if g is None:  # no gradient came back to this output
        return dx, dw, None, dbias, *rest

    g_row, g_col = g
    del g
    if needs_dx:
        assert g_row is not None
        dx = dgrad(ctx, g_row, weight, w_col, offs)
        del w_col, g_row
    if needs_dw and plan.saves_x:
        assert grad is not None
        dw = grouped_wgrad(grad, x_data, offs, plan.w_dtype)
        if main_grad is not None:
            main_grad.add_(dw)
            dw = in_place_of_added(main_grad, plan.w_dtype)
    elif needs_dw:
        assert g_col is not None
        assert plan.x_columnwise is not None
        x_col = Quantized(x_data, x_scale, plan.x_columnwise)
        dw = wgrad(plan, g_col, x_col, offs, main_grad)
    return dx, dw, None, dbias, *rest


def dgrad(
    read: Any, g: Quantized, weight: Sequence[Tensor], w_col: Quantized | None, offs: Tensor
) -> Tensor:
    """``dx[T, K] = g w[e]``, of the weight's columnwise form, or of what was saved of it.

    ``read``: has what ``linear.read_weight`` has put into it, and the plan.
    """
    plan: GroupedPlan = read.plan
    if w_col is None:
        return saved_weight.dgrad_as_one_op(
            g, weight, read.names, plan.weight_format, plan.x_dtype, offs
        )
    return grouped_gemm(g, w_col, offs, None, plan.x_dtype)


def wgrad(
    plan: GroupedPlan, g: Quantized, x: Quantized, offs: Tensor, main_grad: Tensor | None
) -> Tensor | None:
    """``dw[E, N, K] = gᵀ x`` of columnwise forms; None if it was added to ``main_grad``."""
    tokens = plan.tokens
    if main_grad is None:
        if plan.w_is_transposed:
            return grouped_gemm_wgrad(x, g, offs, tokens, plan.w_dtype).transpose(1, 2)
        return grouped_gemm_wgrad(g, x, offs, tokens, plan.w_dtype)
    if main_grad.is_contiguous():
        grouped_gemm_wgrad_add_(main_grad, g, x, offs, tokens)
    else:  # it lies in memory as [E, K, N]
        grouped_gemm_wgrad_add_(main_grad.transpose(1, 2), x, g, offs, tokens)
    return in_place_of_added(main_grad, plan.w_dtype)


def sum_groups(x: Tensor, offs: Tensor) -> Tensor:
    """The sums ``[E, N]`` of the rows of each group of ``x[T, N]``, in fp32.

    Deterministic and without a synchronisation; rows of no group are not read.
    """
    ends = offs.clamp(0, x.shape[0]).cummax(0).values  # what is beyond would be read from memory
    begins_and_end = torch.nn.functional.pad(ends, (1, 0))
    return torch.segment_reduce(x.float(), "sum", offsets=begins_and_end, unsafe=True, initial=0)


# _GroupedLinear.apply without its preparations for functorch, which would refuse it anyway
_apply_eagerly = super(torch.autograd.Function, _GroupedLinear).apply
