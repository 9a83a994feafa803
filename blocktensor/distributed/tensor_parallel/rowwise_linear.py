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
import torch.nn.functional as F
from torch import Tensor

from ...autograd.backward import FP8Function, Gradients, run_backward
from ...autograd.linear import (
    dgrad,
    forms_of,
    sum_rows,
)
from ...autograd.linear_plan import LinearPlan, plan_linear
from ...autograd.saved_weight import read_in_backward
from ...ops.cast.ops import quantize_columnwise
from ...ops.formats import BlockFormat, Quantized
from ...ops.gemm.ops import gemm
from ...tensor.fp8_tensor import BlockwiseFP8Tensor
from .collectives import Pending, Reduction, ready
from .token_shards import TokenShards
from .weight_part import WeightPart, read_part
from .wgrad_input import (
    gather_saved,
    is_gathered_in_fp8,
    saved_tensors,
    wgrad,
    without_front,
)


def rowwise_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    *,
    dim: int | None,
    reduction: Reduction,
    part: WeightPart | None,
) -> Tensor:
    """``x wᵀ + bias`` of this rank's tokens, or of all tokens.

    Args:
        x: this rank's columns ``[..., K/ranks]``, of all tokens.
        w: this rank's columns ``[N, K/ranks]`` of the FP8 weight.
        bias: the whole bias ``[N]``, added in fp32 to the sum.
        dim: along which y is cut, counted from the front; None: every rank gets all of it.
        reduction: how partial sums are added.
        part: where ``w`` lies in the whole weight if parts lie off the grid of blocks.

    Returns:
        ``[..., N]``.

    Raises:
        TypeError, ValueError: as :func:`blocktensor.functional.linear`; tokens that cannot be cut
            into equal parts; an FP8 input of a weight that is cut off the grid.
    """
    with torch._C.DisableTorchFunctionSubclass():
        plan = plan_linear(x, w, bias, None)
        if plan.casts_x:
            x = x.to(plan.out_dtype)
        if part is not None and isinstance(x, BlockwiseFP8Tensor):
            raise ValueError(
                f"the FP8 input {list(x.shape)} of a RowwiseParallel linear whose weight is cut "
                f"off the grid of {plan.format.cols} inputs: pass the high-precision tensor"
            )
        tokens = None if dim is None else TokenShards.of_whole(x.shape, dim, reduction.group)
        y: Tensor = _Rowwise.apply(x, w, bias, plan, tokens, reduction, part)
        return y


class _Rowwise(FP8Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        plan: LinearPlan,
        tokens: TokenShards | None,
        reduction: Reduction,
        part: WeightPart | None,
    ) -> Tensor:
        front = 0 if part is None else part.front
        ctx.plan, ctx.tokens, ctx.reduction, ctx.front = plan, tokens, reduction, front
        w_row, w_saved = read_part(ctx, w, part, plan)
        behind = F.pad(x, (front, 0)) if front else x
        x_row, x_col = forms_of(behind, plan.format, plan.x_columnwise)
        assert x_row is not None
        partial = gemm(x_row, w_row, None, reduction.wire(plan.out_dtype))
        if tokens is None:
            y = reduction.all_reduce(partial).wait()
        else:
            y = tokens.reduce_scatter(partial, reduction).wait()
        if bias is not None:
            y = y.float() + bias.float()
        x_saved: Sequence[Tensor | None] = (None, None) if x_col is None else x_col[:2]
        if plan.saves_x:
            x_saved = x.unchanged_source() if isinstance(x, BlockwiseFP8Tensor) else x, None
        ctx.save_for_backward(*x_saved, *(w_saved if plan.needs[0] else ()))
        ctx.set_materialize_grads(False)
        shape = x.shape if tokens is None else tokens.part_shape(x.shape)
        y = y.to(plan.out_dtype)
        # a plain view made in here, as of what was reduced, could not be modified by the caller
        return torch.ops.aten._unsafe_view(y, (*shape[:-1], w.shape[0]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return run_backward(ctx, grads, _gradients, ctx.plan.are_tensors)


def _gradients(ctx: Any, saved: Sequence[Tensor], grads: list[Any], asked: list[bool]) -> Gradients:
    """The gradients of the arguments of :meth:`_Rowwise.forward`."""
    plan: LinearPlan = ctx.plan
    grad: Tensor | None = grads.pop()
    needs_dx, needs_dw, needs_dbias = asked
    x_saved, weight = saved_tensors(saved)
    dx = dw = dbias = None
    if grad is None:  # no gradient came back to this output
        read_in_backward(ctx, weight, False)
        return (None,) * 7
    row, col = plan.grad_formats
    grad = grad.reshape(-1, grad.shape[-1])
    g_row, g_col = _gather(grad, row if needs_dx else None, col, needs_dw, ctx.tokens)
    dbias_pending = _reduce_bias(ctx, grad) if needs_dbias else None
    w_col = read_in_backward(ctx, weight, needs_dx)
    if g_row is not None:
        dx = dgrad(ctx, g_row.wait(), weight, w_col, plan.x_dtype)
        dx = without_front(dx, ctx.front, 1).view(plan.x_shape)
        del w_col, g_row
    if g_col is not None:
        x_whole = gather_saved(x_saved, plan, None).wait()
        dw = wgrad(g_col.wait(), x_whole, plan.w_dtype)
        dw = without_front(dw, 0 if plan.saves_x else ctx.front, 1)
    if dbias_pending is not None:
        dbias = dbias_pending.wait().to(plan.bias_dtype)
    return dx, dw, dbias, None, None, None, None


def _gather(
    grad: Tensor,
    row: BlockFormat | None,
    col: BlockFormat | None,
    for_wgrad: bool,
    tokens: TokenShards | None,
) -> tuple[Pending[Quantized] | None, Pending[Any] | None]:
    """What dgrad and wgrad read of the whole gradient; what dgrad reads is sent first."""
    in_fp8 = is_gathered_in_fp8(col, tokens)
    g_row, g_col = forms_of(grad, row, col if for_wgrad and in_fp8 else None)
    if tokens is None:
        plain = ready(grad) if for_wgrad else None
        return _ready(g_row), plain if col is None else _ready(g_col)
    pending = None if g_row is None else tokens.gather_rowwise(g_row)
    if g_col is not None:
        return pending, tokens.gather_columnwise(g_col)
    if not for_wgrad:
        return pending, None
    rows = tokens.gather_plain(grad)
    return pending, rows if col is None else Pending(
        (), lambda: quantize_columnwise(rows.wait(), col)
    )


def _ready(form: Quantized | None) -> Pending[Quantized] | None:
    return None if form is None else ready(form)


def _reduce_bias(ctx: Any, grad: Tensor) -> Pending[Tensor]:
    """The fp32 gradient of the bias, which every rank has whole."""
    own = sum_rows(grad, torch.float32)
    if ctx.tokens is None:
        return ready(own)
    made: Pending[Tensor] = ctx.reduction.all_reduce(own)
    return made
