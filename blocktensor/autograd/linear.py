"""The differentiable linear: fprop, dgrad and wgrad in FP8.

::

    fprop  y  = x  · wᵀ    x.rowwise     w.rowwise       1x128 · 128x128
    dgrad  dx = g  · w     g.rowwise     w.columnwise    1x128 · 128x128
    wgrad  dw = gᵀ · x     g.columnwise  x.columnwise    1x128 · 1x128, or 1x128 · 128x128

Saved for backward: the FP8 columnwise form of x, in the blocks of ``Recipe(wgrad_input=...)``, and
the weight (``saved_weight.py``). With ``wgrad_input="high_precision"`` x is saved itself, and wgrad
is a product in its dtype (``high_precision.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.cast.ops import quantize_both, quantize_forms, quantize_rowwise
from ..ops.formats import BlockFormat, Quantized
from ..ops.gemm.ops import gemm, gemm_add_
from ..ops.runtime.specialize import must_dispatch, recorded
from ..recipe import Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from . import saved_weight
from .backward import FP8Function, Gradients, run_backward
from .check_operands import refuse_prepared
from .high_precision import wgrad
from .linear_plan import LinearPlan, Plan, plan_linear
from .main_grad import check_main_grad, where_to_add
from .shared_cast import this_thread
from .split_backward import in_place_of_added


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, recipe: Recipe | None = None
) -> Tensor:
    """:func:`blocktensor.functional.linear`, for plain and for FP8 operands.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, or a 1x128 BlockwiseFP8Tensor.
        w: ``[N, K]``: BlockwiseFP8Weight, BlockwiseFP8Tensor, or a plain tensor, which is cast.
        bias: ``[N]``, added in fp32 before the one rounding of the output.
        recipe: for plain ``x`` and ``w``; default: the recipe of the operand that has one.
    """
    # Every attribute of a subclass would otherwise pass through __torch_function__, 2 us each.
    with torch._C.DisableTorchFunctionSubclass():
        if type(x) is BlockwiseFP8Weight:
            x = x.high_precision()
        elif type(x) is BlockwiseFP8Tensor:
            refuse_prepared(x)
        plan = plan_linear(x, w, bias, recipe)
        cast: tuple[Tensor, ...] = ()
        running = this_thread.running
        if running is not None and not isinstance(x, BlockwiseFP8Tensor):
            cast = running.forms_of(x, w, None, plan, _cast)
        if plan.casts_x:
            x = x.to(plan.out_dtype)
        apply = _Linear.apply if plan.tracing else _apply_eagerly
        y: Tensor = apply(x, w, bias, plan, *cast)
        return y


def _cast(plan: Plan, x: Tensor) -> tuple[Tensor, ...]:
    """Return data and scale of the rowwise form of x and, if a product reads it, the columnwise."""
    row, col = quantize_forms(x, plan.format, plan.x_columnwise)
    assert row is not None
    return *row[:2], *(() if col is None else col[:2])


def _fprop(
    x: Tensor,
    w: Quantized,
    bias: Tensor | None,
    format: BlockFormat,
    out_dtype: torch.dtype,
    columnwise: BlockFormat | None,
) -> tuple[Tensor, Quantized | None]:
    """``y = x wᵀ (+ bias)`` and, if it has a format, the columnwise form of x; of rowwise w."""
    x_row, x_col = forms_of(x, format, columnwise)
    assert x_row is not None
    return gemm(x_row, w, bias, out_dtype), x_col


def forms_of(
    x: Tensor, rowwise: BlockFormat | None, columnwise: BlockFormat | None
) -> tuple[Quantized | None, Quantized | None]:
    """The forms of an activation or gradient, cast now unless it is FP8 already."""
    if not isinstance(x, BlockwiseFP8Tensor):
        return quantize_forms(x, rowwise, columnwise)
    for side, held, wanted in zip(("row", "column"), x.formats, (rowwise, columnwise), strict=True):
        if wanted is not None and held.block_shape != wanted.block_shape:
            raise ValueError(
                f"a {side}wise form in {held.name} blocks where an FP8 linear reads {wanted.name}: "
                f"pass the tensor in high precision"
            )
    return x.rowwise() if rowwise else None, x.columnwise() if columnwise else None


def _dgrad_and_wgrad(
    grad: Tensor,
    x: Quantized,
    w: Quantized,
    format: BlockFormat,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``dx = grad w`` and ``dw = gradᵀ x``; of columnwise forms."""
    g_row, g_col = quantize_both(grad, format)
    dx = gemm(g_row, w, None, x_dtype)
    return dx, gemm(g_col, x, None, w_dtype)


class _Linear(FP8Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, plan: LinearPlan, *cast: Tensor
    ) -> Tensor:
        ctx.plan, ctx.casts = plan, len(cast)
        w_row, w_saved = read_weight(ctx, w, plan)
        if cast:
            y = gemm(Quantized(cast[0], cast[1], plan.format), w_row, bias, plan.out_dtype)
            x_saved: Sequence[Tensor | None] = cast[2:] if plan.x_columnwise else (None, None)
        else:
            if plan.fprop is None:
                plan.fprop = recorded(_fprop, plan.records_forward)
            y, x_col = plan.fprop(x, w_row, bias, plan.format, plan.out_dtype, plan.x_columnwise)
            x_saved = (None, None) if x_col is None else x_col[:2]
        if plan.saves_x:
            x_saved = x.unchanged_source() if isinstance(x, BlockwiseFP8Tensor) else x, None
        ctx.save_for_backward(*x_saved, *(w_saved if plan.needs[0] else ()))
        ctx.set_materialize_grads(False)
        return y if x.ndim == 2 else with_leading(y, x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return run_backward(ctx, grads, _gradients, ctx.plan.are_tensors)


def with_leading(y: Tensor, shape: Sequence[int]) -> Tensor:
    """``y[M, N]`` with the leading dimensions of ``shape[..., K]``, in the forward of a Function.

    A plain view made there could not be modified in place by the caller.
    """
    if len(shape) == 2:
        return y
    made: Tensor = torch.ops.aten._unsafe_view(y, (*shape[:-1], y.shape[1]))
    return made


def read_weight(ctx: Any, w: Tensor, plan: Plan) -> tuple[Quantized, Sequence[Tensor]]:
    """The rowwise form of the weight in a forward, and what to save of the weight for dgrad.

    ``ctx`` takes what backward has to know of it: ``cache``, ``cast`` and ``names``.
    """
    needs_dx, needs_dw = plan.needs
    ctx.cache = ctx.cast = None
    ctx.names = ()
    if isinstance(w, BlockwiseFP8Weight):
        ctx.cache = w.cache
        if w.cache.main_grad is not None and needs_dw:
            check_main_grad(plan.tracing)
        if needs_dx and not plan.tracing:
            w_row, ctx.cast = w.rowwise_for_backward()
        elif needs_dx and w.recipe.cache_weight == "step":  # backward casts nothing then
            if w.cache.reuses():  # in eager mode, of an x of another type
                w_row = w.rowwise(before_backward=needs_dw)
                ctx.names, saved_form = saved_weight.ROWWISE, w_row
            else:
                w_row, saved_form = w.both_forms()
                ctx.names = saved_weight.COLUMNWISE
            return w_row, saved_form[:2]
        else:
            w_row = w.rowwise(before_backward=needs_dw)
        return w_row, (w,)
    if isinstance(w, BlockwiseFP8Tensor):
        # Dynamo may take a method of a tensor for an op, which returns tensors alone
        w_row = w.operand.need_rowwise() if plan.tracing else w.rowwise()
        if w.generation is not None and not plan.tracing:
            ctx.cast = saved_weight.gathered_cast(w.generation)
        saved: Sequence[Tensor] = (w,)
        if needs_dx and not plan.tracing:
            saved, ctx.names = saved_weight.inner_tensors(w)
        return w_row, saved
    w_row = quantize_rowwise(w, plan.weight_format)
    ctx.names = saved_weight.ROWWISE
    return w_row, w_row[:2]


def _gradients(ctx: Any, saved: Sequence[Tensor], grads: list[Any], asked: list[bool]) -> Gradients:
    """The gradients of the arguments of :meth:`_Linear.forward`."""
    plan: LinearPlan = ctx.plan
    grad: Tensor | None = grads.pop()
    needs_dx, needs_dw, needs_dbias = asked
    dx = dw = dbias = None
    rest = (None,) * (1 + ctx.casts)
    if needs_dbias and grad is not None:
        dbias = sum_rows(grad, plan.bias_dtype)
    if not (needs_dx or needs_dw):
        return dx, dw, dbias, *rest

    x_data, x_scale, *weight = saved
    x_col = None if plan.x_columnwise is None else Quantized(x_data, x_scale, plan.x_columnwise)
    main_grad = None if ctx.cache is None else ctx.cache.main_grad
    if main_grad is not None and needs_dw:
        main_grad = where_to_add(ctx, main_grad)
    g = None
    if grad is not None:
        if plan.records_backward and needs_dx and needs_dw and main_grad is None:
            assert x_col is not None
            both = _recorded_gradients(ctx, grad, x_col, weight)
            if both is not None:
                return *both, dbias, *rest
        row, col = plan.grad_formats
        g = forms_of(grad, row if needs_dx else None, col if needs_dw else None)
        if not plan.saves_x:
            del grad  # its forms are enough
    w_col = saved_weight.read_in_backward(ctx, weight, needs_dx and g is not None)
    if g is None:  # no gradient came back to this output
        return dx, dw, dbias, *rest

    g_row, g_col = g
    del g
    if needs_dx:
        assert g_row is not None
        dx = dgrad(ctx, g_row, weight, w_col, plan.x_dtype).view(plan.x_shape)
        del w_col, g_row
    if needs_dw and plan.saves_x:
        assert grad is not None
        if main_grad is None:
            dw = wgrad(grad, x_data, plan.w_dtype)
        else:
            main_grad.add_(wgrad(grad, x_data, torch.float32))
            dw = in_place_of_added(main_grad, plan.w_dtype)
    elif needs_dw:
        assert g_col is not None
        assert x_col is not None
        if main_grad is None:
            dw = gemm(g_col, x_col, None, plan.w_dtype)
        else:
            gemm_add_(main_grad, g_col, x_col)
            dw = in_place_of_added(main_grad, plan.w_dtype)
    return dx, dw, dbias, *rest


def dgrad(
    read: Any,
    g: Quantized,
    weight: Sequence[Tensor],
    w_col: Quantized | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``dx[M, K] = g w``, of rowwise g and of the weight's columnwise form, or of what was saved.

    ``read``: has what :func:`read_weight` has put into it, and the plan.
    """
    if w_col is None:
        format = read.plan.weight_format
        return saved_weight.dgrad_as_one_op(g, weight, read.names, format, out_dtype)
    return gemm(g, w_col, None, out_dtype)


def sum_rows(grad: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The gradient of a bias, from that of the output; summed in fp32."""
    return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(dtype)


def _recorded_gradients(
    ctx: Any, grad: Tensor, x: Quantized, weight: Sequence[Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Both gradients by one recorded sequence of launches; None where single ops must run."""
    plan: LinearPlan = ctx.plan
    if must_dispatch(grad) or not isinstance(weight[0], BlockwiseFP8Weight):
        return None
    w = saved_weight.read_in_backward(ctx, weight, True)
    is_matrix = grad.ndim == 2
    grad = grad if is_matrix else grad.reshape(-1, grad.shape[-1])
    run = plan.record_backward(_dgrad_and_wgrad, grad, x)
    dx, dw = run(grad, x, w, plan.format, plan.x_dtype, plan.w_dtype)
    return dx if is_matrix else dx.view(plan.x_shape), dw


# _Linear.apply without its preparations for functorch, which would refuse it anyway
_apply_eagerly = super(torch.autograd.Function, _Linear).apply
