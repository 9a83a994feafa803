"""The linear whose weight is cut along its outputs: every rank computes some columns of y.

::

    fprop  y_r = x · w_rᵀ           x gathered rowwise in FP8
    dgrad  dx  = Σ_r g_r · w_r      partial sums, reduced in high precision
    wgrad  dw_r = g_rᵀ · x          x gathered columnwise in FP8, beside dgrad

Saved for backward: what wgrad reads of this rank's tokens alone (``wgrad_input.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...autograd.backward import FP8Function, Gradients, run_backward
from ...autograd.linear import (
    dgrad,
    forms_of,
    sum_rows,
    with_leading,
)
from ...autograd.linear_plan import LinearPlan, plan_linear
from ...autograd.saved_weight import read_in_backward
from ...ops.gemm.ops import gemm
from ...tensor.fp8_tensor import BlockwiseFP8Tensor
from .collectives import Pending, Reduction, ready
from .shared_input import SharedInput
from .token_shards import TokenShards
from .weight_part import WeightPart, read_part
from .wgrad_input import (
    Saved,
    SharedGather,
    is_gathered_in_fp8,
    saved_tensors,
    wgrad,
    without_front,
)


def colwise_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    *,
    tokens: TokenShards | None,
    reduction: Reduction | None,
    part: WeightPart | None,
) -> Tensor:
    """This rank's columns of ``x wᵀ + bias``.

    Args:
        x: ``[..., K]``: this rank's tokens, or all of them if ``tokens`` is None. All tokens that
            were prepared for several linears are given with neither ``tokens`` nor ``reduction``.
        w: this rank's rows ``[N/ranks, K]`` of the FP8 weight.
        bias: those of the bias.
        tokens: how tokens are cut.
        reduction: how the partial sums of the data gradient are added; None returns them.
        part: where ``w`` lies in the whole weight if parts lie off the grid of blocks.

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
        y: Tensor = _Colwise.apply(x, w, bias, plan, tokens, reduction, part)
        return y


class _Colwise(FP8Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        plan: LinearPlan,
        tokens: TokenShards | None,
        reduction: Reduction | None,
        part: WeightPart | None,
    ) -> Tensor:
        needs_dx, needs_dw = plan.needs
        front = 0 if part is None else part.front
        ctx.plan, ctx.tokens, ctx.reduction, ctx.front = plan, tokens, reduction, front
        shared = x.prepared if isinstance(x, BlockwiseFP8Tensor) else None
        if shared is None:
            ctx.gather = SharedGather()
            x_row, x_saved = _cast(x, plan, tokens)
        else:
            assert isinstance(shared, SharedInput) and isinstance(x, BlockwiseFP8Tensor)
            ctx.gather, ctx.tokens = shared.gather, shared.tokens
            x_row, x_saved = x.rowwise(), shared.saved
        ctx.gather.users += needs_dw
        pending = ready(x_row) if tokens is None else tokens.gather_rowwise(x_row)
        w_row, w_saved = read_part(ctx, w, part, plan)
        if bias is not None and front:
            bias = F.pad(bias, (front, 0))
        y = without_front(gemm(pending.wait(), w_row, bias, plan.out_dtype), front, 1)
        kept = x_saved if needs_dw else (None, None)
        ctx.save_for_backward(*kept, *(w_saved if needs_dx else ()))
        ctx.set_materialize_grads(False)
        shape = x.shape if tokens is None else tokens.whole_shape(x.shape)
        return with_leading(y, shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return run_backward(ctx, grads, _gradients, ctx.plan.are_tensors)


def _cast(x: Tensor, plan: LinearPlan, tokens: TokenShards | None) -> tuple[Any, Saved]:
    """The rowwise form of the tokens that came, and what to save of them."""
    in_fp8 = is_gathered_in_fp8(plan.x_columnwise, tokens)
    as_it_came = plan.saves_x or (plan.needs[1] and not in_fp8)
    if as_it_came and not plan.saves_x and isinstance(x, BlockwiseFP8Tensor):
        raise ValueError(
            f"the FP8 input {list(x.shape)} of a ColwiseParallel linear is cut where its "
            f"columnwise blocks of {plan.format.cols} tokens do not begin: pass the "
            f"high-precision tensor, or pad the tokens of each rank to a multiple of "
            f"{plan.format.cols}"
        )
    row, col = forms_of(x, plan.format, plan.x_columnwise if in_fp8 else None)
    if as_it_came:
        return row, (x.unchanged_source() if isinstance(x, BlockwiseFP8Tensor) else x, None)
    return row, (None, None) if col is None else col[:2]


def _gradients(ctx: Any, saved: Sequence[Tensor], grads: list[Any], asked: list[bool]) -> Gradients:
    """The gradients of the arguments of :meth:`_Colwise.forward`."""
    plan: LinearPlan = ctx.plan
    grad: Tensor | None = grads.pop()
    needs_dx, needs_dw, needs_dbias = asked
    x_saved, weight = saved_tensors(saved)
    dx = dw = dbias = None
    if grad is None:  # no gradient came back to this output
        read_in_backward(ctx, weight, False)
        return (None,) * 7
    if needs_dbias:
        dbias = sum_rows(grad, plan.bias_dtype)
    x_pending = ctx.gather.begin(x_saved, plan, ctx.tokens) if needs_dw else None
    rows, front = grad.reshape(-1, grad.shape[-1]), ctx.front
    row, col = plan.grad_formats
    behind = F.pad(rows, (front, 0)) if front else rows
    g_row, g_col = forms_of(behind, row if needs_dx else None, col if needs_dw else None)
    w_col = read_in_backward(ctx, weight, needs_dx)
    dx_pending = None
    if needs_dx:
        assert g_row is not None
        dtype = plan.x_dtype if ctx.reduction is None else ctx.reduction.wire(plan.x_dtype)
        partial = dgrad(ctx, g_row, weight, w_col, dtype)
        dx_pending = _reduce(partial, ctx.reduction, ctx.tokens)
        del w_col, g_row, partial
    if x_pending is not None:
        g = rows if g_col is None else g_col
        dw = wgrad(g, x_pending.wait(), plan.w_dtype)
        dw = without_front(dw, 0 if g_col is None else front, 0)
    if dx_pending is not None:
        dx = dx_pending.wait().to(plan.x_dtype).view(plan.x_shape)
    return dx, dw, dbias, None, None, None, None


def _reduce(
    partial: Tensor, reduction: Reduction | None, tokens: TokenShards | None
) -> Pending[Tensor]:
    """The data gradient of this rank's tokens, from the partial sums of all ranks."""
    if reduction is None:
        return ready(partial)
    if tokens is None:
        return reduction.all_reduce(partial)
    return tokens.reduce_scatter(partial, reduction)
