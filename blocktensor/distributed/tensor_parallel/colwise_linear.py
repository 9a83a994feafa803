"""The linear whose weight is cut along its outputs: every rank computes some columns of y.

::

    fprop  y_r = x · w_rᵀ           x gathered rowwise in FP8
    dgrad  dx  = Σ_r g_r · w_r      partial sums, reduced in high precision
    wgrad  dw_r = g_rᵀ · x          x gathered columnwise in FP8, beside dgrad

Saved for backward: the columnwise form of this rank's tokens alone. If they do not lie on the grid
of blocks, they are saved and gathered as they came and cast after the gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...autograd.linear import (
    Gradients,
    bias_gradient,
    dgrad,
    forms_of,
    read_weight,
    run_backward,
)
from ...autograd.linear_plan import LinearPlan, plan_linear
from ...autograd.saved_weight import read_in_backward
from ...ops.cast.ops import quantize_columnwise
from ...ops.formats import Quantized
from ...ops.gemm.ops import gemm
from ...tensor.fp8_tensor import BlockwiseFP8Tensor
from .collectives import Pending, Reduction
from .token_shards import TokenShards


def colwise_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    tokens: TokenShards | None,
    reduction: Reduction | None,
) -> Tensor:
    """This rank's columns of ``x wᵀ + bias``.

    Args:
        x: ``[..., K]``: this rank's tokens, or all of them if ``tokens`` is None.
        w: this rank's rows ``[N/ranks, K]`` of the FP8 weight.
        bias: those of the bias.
        tokens: how tokens are cut.
        reduction: how the partial sums of the data gradient are added; None returns them.

    Returns:
        ``[..., N/ranks]`` of all tokens.

    Raises:
        TypeError, ValueError: as :func:`blocktensor.functional.linear`; an FP8 input whose tokens
            are cut off the grid.
    """
    with torch._C.DisableTorchFunctionSubclass():
        plan = plan_linear(x, w, bias, None)
        if plan.casts_x:
            x = x.to(plan.out_dtype)
        y: Tensor = _Colwise.apply(x, w, bias, plan, tokens, reduction)
        return y


class _Colwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        plan: LinearPlan,
        tokens: TokenShards | None,
        reduction: Reduction | None,
    ) -> Tensor:
        needs_dx, needs_dw = plan.needs
        ctx.plan, ctx.tokens, ctx.reduction = plan, tokens, reduction
        on_grid = tokens is None or tokens.on_grid(plan.format)
        if needs_dw and not on_grid and isinstance(x, BlockwiseFP8Tensor):
            raise ValueError(
                f"the FP8 input {list(x.shape)} of a ColwiseParallel linear is cut where its "
                f"columnwise blocks of {plan.format.cols} tokens do not begin: pass the "
                f"high-precision tensor, or pad the tokens of each rank to a multiple of "
                f"{plan.format.cols}"
            )
        x_row, x_col = forms_of(x, plan.format, True, needs_dw and on_grid)
        assert x_row is not None
        pending = None if tokens is None else tokens.gather_rowwise(x_row)
        w_row, w_saved = read_weight(ctx, w, plan)
        if pending is not None:
            x_row = pending.wait()
        y = gemm(x_row, w_row, bias, plan.out_dtype)
        x_saved: Sequence[Tensor | None] = (None, None) if x_col is None else x_col[:2]
        if needs_dw and not on_grid:
            x_saved = x, None
        ctx.save_for_backward(*x_saved, *(w_saved if needs_dx else ()))
        ctx.set_materialize_grads(False)
        shape = x.shape if tokens is None else tokens.whole_shape(x.shape)
        # a plain view made in here could not be modified in place by the caller
        return y if x.ndim == 2 else torch.ops.aten._unsafe_view(y, (*shape[:-1], w.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        return run_backward(ctx, grad, _gradients)


def _gradients(ctx: Any, saved: Sequence[Tensor], grad: Tensor | None) -> Gradients:
    """The gradients of the arguments of :meth:`_Colwise.forward`."""
    plan: LinearPlan = ctx.plan
    tokens: TokenShards | None = ctx.tokens
    needs_dx, needs_dw, needs_dbias, *_ = ctx.needs_input_grad
    x_data, x_scale, *weight = saved
    dx = dw = dbias = None
    if grad is None:  # no gradient came back to this output
        read_in_backward(ctx, weight, False)
        return (None,) * 6
    if needs_dbias:
        dbias = bias_gradient(grad).to(plan.bias_dtype)
    g_row, g_col = forms_of(grad, plan.format, needs_dx, needs_dw)
    x_pending = _gather_columnwise(x_data, x_scale, plan, tokens) if needs_dw else None
    w_col = read_in_backward(ctx, weight, needs_dx)
    dx_pending = None
    if needs_dx:
        assert g_row is not None
        dx_pending = _reduce(ctx, g_row, weight, w_col)
        del w_col, g_row
    if needs_dw:
        assert g_col is not None and x_pending is not None
        dw = gemm(g_col, x_pending.wait(), None, plan.w_dtype)
    if dx_pending is not None:
        dx = dx_pending.wait().to(plan.x_dtype).view(plan.x_shape)
    return dx, dw, dbias, None, None, None


def _gather_columnwise(
    x: Tensor, scale: Tensor | None, plan: LinearPlan, tokens: TokenShards | None
) -> Pending[Quantized]:
    """The columnwise form of the whole input, of what was saved of this rank's."""
    if scale is None:
        assert tokens is not None
        rows = tokens.gather_plain(x.flatten(0, -2))
        return Pending([], lambda: quantize_columnwise(rows.wait(), plan.format))
    form = Quantized(x, scale, plan.format)
    return Pending([], lambda: form) if tokens is None else tokens.gather_columnwise(form)


def _reduce(
    ctx: Any, grad: Quantized, weight: Sequence[Tensor], w_col: Quantized | None
) -> Pending[Tensor]:
    """The data gradient of this rank's tokens, from the partial sums of all ranks."""
    reduction: Reduction | None = ctx.reduction
    dtype = ctx.plan.x_dtype if reduction is None else reduction.wire(ctx.plan.x_dtype)
    partial = dgrad(ctx, grad, weight, w_col, dtype)
    if reduction is None:
        return Pending([], lambda: partial)
    if ctx.tokens is None:
        return reduction.all_reduce(partial)
    tokens: TokenShards = ctx.tokens
    return tokens.reduce_scatter(partial, reduction)
