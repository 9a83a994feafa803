"""The linear whose weight is cut along its inputs: every rank computes a partial sum of y.

::

    fprop  y   = Σ_r x_r · w_rᵀ     partial sums, reduced in high precision
    dgrad  dx_r = g · w_r           g gathered rowwise in FP8
    wgrad  dw_r = gᵀ · x_r          g gathered columnwise in FP8, beside dgrad

Nothing is gathered if every rank has all tokens of y. The columnwise form of g whose tokens do not
lie on the grid of blocks is gathered as it came and cast after the gather.
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
from .collectives import Pending, Reduction
from .token_shards import TokenShards


def rowwise_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, dim: int | None, reduction: Reduction
) -> Tensor:
    """``x wᵀ + bias`` of this rank's tokens, or of all tokens.

    Args:
        x: this rank's columns ``[..., K/ranks]``, of all tokens.
        w: this rank's columns ``[N, K/ranks]`` of the FP8 weight.
        bias: the whole bias ``[N]``, added in fp32 to the sum.
        dim: along which y is cut, counted from the front; None: every rank gets all of it.
        reduction: how partial sums are added.

    Returns:
        ``[..., N]``.

    Raises:
        TypeError, ValueError: as :func:`blocktensor.functional.linear`; tokens that cannot be cut
            into equal parts.
    """
    with torch._C.DisableTorchFunctionSubclass():
        plan = plan_linear(x, w, bias, None)
        if plan.casts_x:
            x = x.to(plan.out_dtype)
        tokens = None if dim is None else TokenShards.of_whole(x.shape, dim, reduction.group)
        y: Tensor = _Rowwise.apply(x, w, bias, plan, tokens, reduction)
        return y


class _Rowwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        plan: LinearPlan,
        tokens: TokenShards | None,
        reduction: Reduction,
    ) -> Tensor:
        needs_dx, needs_dw = plan.needs
        ctx.plan, ctx.tokens, ctx.reduction = plan, tokens, reduction
        w_row, w_saved = read_weight(ctx, w, plan)
        x_row, x_col = forms_of(x, plan.format, True, needs_dw)
        assert x_row is not None
        partial = gemm(x_row, w_row, None, reduction.wire(plan.out_dtype))
        if tokens is None:
            y = reduction.all_reduce(partial).wait()
        else:
            y = tokens.reduce_scatter(partial, reduction).wait()
        if bias is not None:
            y = y.float() + bias.float()
        x_saved = (None, None) if x_col is None else x_col[:2]
        ctx.save_for_backward(*x_saved, *(w_saved if needs_dx else ()))
        ctx.set_materialize_grads(False)
        shape = x.shape if tokens is None else tokens.part_shape(x.shape)
        y = y.to(plan.out_dtype)
        # a plain view made in here could not be modified in place by the caller
        return torch.ops.aten._unsafe_view(y, (*shape[:-1], w.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        return run_backward(ctx, grad, _gradients)


def _gradients(ctx: Any, saved: Sequence[Tensor], grad: Tensor | None) -> Gradients:
    """The gradients of the arguments of :meth:`_Rowwise.forward`."""
    plan: LinearPlan = ctx.plan
    needs_dx, needs_dw, needs_dbias, *_ = ctx.needs_input_grad
    x_data, x_scale, *weight = saved
    dx = dw = dbias = None
    if grad is None:  # no gradient came back to this output
        read_in_backward(ctx, weight, False)
        return (None,) * 6
    row_pending, col_pending = _gather(ctx, grad, needs_dx, needs_dw)
    dbias_pending = _reduce_bias(ctx, grad) if needs_dbias else None
    w_col = read_in_backward(ctx, weight, needs_dx)
    if needs_dx:
        assert row_pending is not None
        dx = dgrad(ctx, row_pending.wait(), weight, w_col, plan.x_dtype).view(plan.x_shape)
        del w_col
    if needs_dw:
        assert col_pending is not None
        x_col = Quantized(x_data, x_scale, plan.format)
        dw = gemm(col_pending.wait(), x_col, None, plan.w_dtype)
    if dbias_pending is not None:
        dbias = dbias_pending.wait().to(plan.bias_dtype)
    return dx, dw, dbias, None, None, None


def _gather(
    ctx: Any, grad: Tensor, rowwise: bool, columnwise: bool
) -> tuple[Pending[Quantized] | None, Pending[Quantized] | None]:
    """Both forms of the whole gradient; the rowwise one, which is needed first, is sent first."""
    tokens: TokenShards | None = ctx.tokens
    format = ctx.plan.format
    on_grid = tokens is None or tokens.on_grid(format)
    g_row, g_col = forms_of(grad, format, rowwise, columnwise and on_grid)
    if tokens is None:
        return _ready(g_row), _ready(g_col)
    row = None if g_row is None else tokens.gather_rowwise(g_row)
    if g_col is not None:
        return row, tokens.gather_columnwise(g_col)
    if not columnwise:
        return row, None
    rows = tokens.gather_plain(grad.reshape(-1, grad.shape[-1]))
    return row, Pending([], lambda: quantize_columnwise(rows.wait(), format))


def _ready(form: Quantized | None) -> Pending[Quantized] | None:
    return None if form is None else Pending([], lambda: form)


def _reduce_bias(ctx: Any, grad: Tensor) -> Pending[Tensor]:
    """The fp32 gradient of the bias, which every rank has whole."""
    own, reduction = bias_gradient(grad), ctx.reduction
    if ctx.tokens is None:
        return Pending([], lambda: own)
    made: Pending[Tensor] = reduction.all_reduce(own)
    return made
