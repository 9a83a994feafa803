"""The differentiable linear and grouped linear: fprop, dgrad and wgrad in FP8.

``matmuls.py`` says how each kind of matmul is computed. Saved for backward: the FP8 columnwise
form of x (or x itself, for a wgrad in high precision), and the weight (``saved_weight.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from ..ops.cast.ops import quantize_with_transpose
from ..ops.formats import Quantized
from ..ops.runtime.specialize import sequence
from ..recipe import Recipe
from ..tensor.adapted import WITH_ADAPTERS, AdaptedWeight
from ..tensor.arithmetic import is_arithmetic
from ..tensor.base import MasterBase, readable
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .backward import FP8Function, Gradients, given_out, refuse_gradients, run_backward
from .matmuls import (
    DENSE,
    Dense,
    Grouped,
    Saved,
    caster,
    derived_columnwise,
    matmul_of,
    saved_of,
)
from .plan import Plan, autocast_dtype, plan_matmul
from .repeat import Repeated
from .saved_weight import SavedWeight, hold_cast
from .shared_cast import Run, this_thread


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, recipe: Recipe | None = None
) -> Tensor:
    """Run ``any_linear.linear`` of a weight without adapters."""
    # Every attribute of a subclass would otherwise pass through __torch_function__, 2 us each.
    with torch._C.DisableTorchFunctionSubclass():
        if type(x) is not Tensor:
            x = _as_input(x)
        return _matmul(x, w, bias, None, recipe)


def linear_override(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run ``F.linear`` in FP8, unless its input is a weight too."""
    if type(weight) is AdaptedWeight:
        return WITH_ADAPTERS[F.linear](input, weight, bias)
    if isinstance(input, MasterBase) and is_arithmetic((input, weight)):
        return F.linear(readable(input), readable(weight), readable(bias))
    return linear(input, weight, bias)


def grouped_linear(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | None = None,
) -> Tensor:
    """Run ``any_linear.grouped_linear`` of a stack without adapters."""
    with torch._C.DisableTorchFunctionSubclass():
        x = _as_input(x)
        if has_no_experts(x, w, offs):
            return _of_no_experts(x, w, bias)
        return _matmul(x, w, bias, offs, recipe)


def _matmul(
    x: Tensor, w: Tensor, bias: Tensor | None, offs: Tensor | None, recipe: Recipe | None
) -> Tensor:
    operands = x, w, bias, offs, recipe
    if repeat.table is not None and not is_compiling():
        known = repeat.run(operands)
        if known is not None:
            return known
    plan = plan_matmul(x, w, bias, recipe, offs)
    if plan.is_cached and plan.records_forward:
        of_backward = _backward if plan.records_backward else None
        known = repeat.remember(operands, plan, _fprop, of_backward)
        if known is not None:
            return known
    cast: tuple[Tensor, ...] = ()
    running = this_thread.running
    if running is not None and (plan.derives_x or not isinstance(x, BlockwiseFP8Tensor)):
        cast = running.forms_of(x, offs, plan, caster(offs))
    if plan.casts_x:
        x = x.to(plan.out_dtype)
    apply = FP8Linear.apply if plan.tracing else _apply_eagerly
    y: Tensor = apply(x, w, bias, offs, plan, None, *cast)
    return y if x.ndim == 2 else given_out(y, (*x.shape[:-1], y.shape[1]))


def _as_input(x: Tensor) -> Tensor:
    if type(x) is BlockwiseFP8Tensor:
        refuse_prepared(x)
    return x.high_precision() if type(x) is BlockwiseFP8Weight else x


def refuse_prepared(x: BlockwiseFP8Tensor) -> None:
    """Refuse an input that was prepared for tensor parallel linear layers, in another layer.

    A replicated linear layer would add its gradient once for each rank.

    Raises:
        NotImplementedError: ``PrepareModuleInput`` has cast the input.
    """
    if x.prepared is not None:
        raise NotImplementedError(
            f"an input {list(x.shape)} that PrepareModuleInput of blocktensor.distributed has cast "
            f"reached a matmul of a layer without ColwiseParallel: apply ColwiseParallel of "
            f"blocktensor.distributed to every linear layer that reads it, or prepare it with "
            f"torch.distributed.tensor.parallel.PrepareModuleInput"
        )


def _shared_forms(
    run: Run, x: Tensor, offs: Tensor | None, plan: Plan
) -> tuple[Quantized, Quantized | None] | None:
    """Return the rowwise and the columnwise form of x that linear layers share in this run."""
    cast = run.forms_of(x, offs, plan, caster(offs))
    return _forms_given(cast, plan) if cast else None


def _forms_given(cast: Sequence[Tensor], plan: Plan) -> tuple[Quantized, Quantized | None]:
    columnwise = plan.x_columnwise
    x_col = None if columnwise is None else Quantized(cast[2], cast[3], columnwise)
    return Quantized(cast[0], cast[1], plan.format), x_col


def has_no_experts(x: Tensor, w: Tensor, offs: Tensor) -> bool:
    """Return True if ``x[T, K]`` is multiplied by a stack of no experts, ``[0, N, K]``."""
    return (x.ndim, w.ndim, *w.shape[:1], *offs.shape) == (2, 3, 0, 0) and x.shape[1] == w.shape[2]


def _of_no_experts(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Return zeros ``[T, N]``, the output of a rank that has no experts.

    Gradients are zeros, not None: all ranks clip and step the same parameters.
    """
    made = torch.zeros(x.shape[0], w.shape[1], dtype=autocast_dtype(x) or x.dtype, device=x.device)
    for tensor in (x, w, bias):
        if tensor is not None and tensor.requires_grad:
            plain = tensor.dequantize() if isinstance(tensor, BlockwiseFP8Tensor) else tensor
            made = made + plain[:0].sum().to(made.dtype)
    return made


class FP8Linear(FP8Function):
    """The autograd function of every matmul, which ``matmul`` or :func:`matmul_of` computes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        offs: Tensor | None,
        plan: Plan,
        matmul: Dense | None,
        *cast: Tensor,
    ) -> Tensor:
        ctx.plan, ctx.matmul, ctx.casts, ctx.x_shape = plan, matmul, len(cast), x.shape
        ctx.derives_x = plan.derives_x and matmul is None and not cast
        p = (DENSE if offs is None else Grouped(offs, x.shape[0])) if matmul is None else matmul
        # collectives run while the weight is cast
        begun = None if matmul is None else p.input(x, plan)
        given = _given(x, cast, plan) if cast else begun
        if plan.records_forward and begun is None:
            x_row, x_saved = given or (None, None)
            weight: Any = w
            if plan.casts_weight:
                w_read: Any = weight.cache.master
            else:
                w_read, w_saved, ctx.weight = p.weight(w, plan)
            y, x_col, w_col = _fprop(x, x_row, w_read, bias, offs, plan)
            if plan.casts_weight:
                w_saved, ctx.weight = hold_cast(weight, plan, w_col)
            x_saved = x_saved or saved_of(x, x_row, x_col, plan)
        else:
            w_row, w_saved, ctx.weight = p.weight(w, plan)
            x_row, x_saved = given or p.input(x, plan)
            y = p.fprop(x_row, w_row, bias, plan)
        ctx.save_for_backward(offs, *x_saved, *w_saved)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return run_backward(ctx, grads, _gradients_of_context, ctx.plan.are_tensors)


def _given(x: Tensor, cast: tuple[Tensor, ...], plan: Plan) -> tuple[Quantized, Saved]:
    """Return the rowwise form of x and the tensors of x to save, given its data and scales."""
    x_row, x_col = _forms_given(cast, plan)
    return x_row, saved_of(x, x_row, x_col, plan)


@sequence(0, 1)
def _fprop(
    x: Tensor,
    x_row: Quantized | None,
    w: Quantized | Tensor,
    bias: Tensor | None,
    offs: Tensor | None,
    plan: Plan,
) -> tuple[Tensor, Quantized | None, Quantized | None]:
    """Return ``y = x wᵀ (+ bias)``, and the columnwise forms of x and w that are cast here.

    ``x_row``: the rowwise form of x, if x is cast already. ``w``: a rowwise form, or a master to
    cast.
    """
    matmul, x_col, w_col = matmul_of(offs, x), None, None
    if isinstance(w, Tensor):
        w, w_col = quantize_with_transpose(w, plan.weight_format)
    if x_row is None:
        x_row, x_col = matmul.forms(x, plan.format, plan.x_columnwise)
    return matmul.fprop(x_row, w, bias, plan), x_col, w_col


@sequence(0)
def _backward(
    grad: Tensor, x: Quantized | None, w: Quantized, offs: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor | None]:
    """Return ``dx = grad w``, and ``dw = gradᵀ x`` unless x is None, of columnwise forms."""
    matmul = matmul_of(offs, grad)
    format = plan.grad_format
    g_row, g_col = matmul.forms(grad, format, None if x is None else format)
    dx = matmul.dgrad(g_row, w, plan)
    return dx, None if x is None else matmul.wgrad(g_col, x, plan)


def _gradients_of_context(
    ctx: Any, saved: list[Any], grads: list[Any], asked: list[bool]
) -> Gradients:
    """Return a gradient for each argument of :meth:`FP8Linear.forward`."""
    if ctx.derives_x and asked[1] and grads[0] is not None:
        formats = ctx.plan.format, ctx.plan.x_columnwise
        saved[1:3] = derived_columnwise(saved[0], saved[1:3], grads[0], *formats)
    dx, *made = _gradients(ctx.plan, ctx.weight, ctx.matmul, saved, grads, asked)
    dx = None if dx is None else dx.view(ctx.x_shape)
    return dx, *made, *(None,) * (3 + ctx.casts)


def _gradients_of_node(
    plan: Plan, read: SavedWeight, saved: list[Any], grads: list[Any], asked: list[bool]
) -> Gradients:
    """Return the gradients of x, w and the bias for the node that ``repeat.py`` makes.

    The node gives the gradient of x, ``[M, K]``, the shape of x.
    """
    refuse_gradients(grads)
    with torch._C.DisableTorchFunctionSubclass():
        return _gradients(plan, read, None, saved, grads, asked)


def _gradients(
    plan: Plan,
    read: SavedWeight,
    matmul: Dense | None,
    saved: Sequence[Tensor],
    grads: list[Any],
    asked: Sequence[bool],
) -> Gradients:
    """Return the gradients of x as a matrix, w and the bias.

    Args:
        plan: of the matmul.
        read: the form of the weight that forward has read.
        matmul: the matmul, if :func:`matmul_of` does not make it.
        saved: ``offs``, data and scale of x, and what ``read`` reads.
        grads: the gradient of y alone, which is removed.
        asked: which of x, w and the bias need a gradient; perhaps no word of an absent bias.
    """
    grad: Tensor | None = grads.pop()
    needs_dx, needs_dw = asked[:2]
    needs_dbias = len(asked) > 2 and asked[2]
    offs, x_data, x_scale, *weight = saved
    is_own = matmul is not None
    matmul = matmul_of(offs, grad) if matmul is None else matmul
    dx = dw = dbias = None
    if needs_dbias and grad is not None:
        dbias = matmul.dbias(grad, plan)
    if grad is None or not (needs_dx or needs_dw):
        read.columnwise(weight, False)
        return dx, dw, matmul.finish(None, dbias, plan)[1]

    x: Any = matmul.wgrad_input((x_data, x_scale), plan) if needs_dw else None
    if plan.records_backward and needs_dx and not is_own:
        w_col = read.columnwise(weight, True)
        assert w_col is not None
        dx, dw = _backward(grad, x, w_col, offs, plan)
        return matmul.finish(dx, dbias, plan)[0], dw, dbias
    in_fp8 = not (plan.plain_dgrad or plan.plain_wgrad)
    if plan.tracing and not is_own and in_fp8:
        dx, dw = matmul.traced_backward(grad, x, read, weight if needs_dx else (), plan)
        dx, dbias = matmul.finish(dx, dbias, plan)
        return dx, dw, dbias
    g_row, g = matmul.grad_forms(grad, plan, needs_dx, needs_dw)
    del grad  # only its forms are needed
    w = (read.values if plan.plain_dgrad else read.columnwise)(weight, needs_dx)
    if needs_dx:
        assert w is not None
        dx = matmul.dgrad(g_row, w, plan)
        del w, g_row
    if needs_dw:
        dw = matmul.wgrad(g, x, plan)
    dx, dbias = matmul.finish(dx, dbias, plan)
    return dx, dw, dbias


repeat = Repeated(
    "FP8LinearBackward",
    lambda x, w, bias, offs, recipe: Plan(x, w, bias, recipe, offs),
    _gradients_of_node,
    shared_forms=_shared_forms,
    with_rows=(0,),
)


# FP8Linear.apply without its preparations for functorch, which would refuse it anyway
_apply_eagerly = super(torch.autograd.Function, FP8Linear).apply
