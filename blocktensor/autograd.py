"""The differentiable linear: fprop, dgrad and wgrad in FP8.

::

    fprop  y  = x  · wᵀ    x.rowwise     w.rowwise       1x128 · 128x128
    dgrad  dx = g  · w     g.rowwise     w.columnwise    1x128 · 128x128
    wgrad  dw = gᵀ · x     g.columnwise  x.columnwise    1x128 · 1x128

Saved for backward: the FP8 columnwise form of x, and the weight (whose FP8 form its cache owns).
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .forms import Forms, SquareForms
from .ops import dgrad, library
from .ops.layouts import ROWWISE_BLOCK, Form
from .ops.pinned import Ops
from .plans import Backward, Plan, plan_linear
from .recipe import DEFAULT_RECIPE, Recipe
from .tensor import BlockwiseFP8Tensor, FP8Type, as_matrix, rowwise_block_forms
from .weight import BlockwiseFP8Weight, FP8Cache


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, recipe: Recipe | None = None
) -> Tensor:
    """``x wᵀ (+ bias)`` in blockwise FP8, forward and backward; differentiable in all three.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, or a 1x128 BlockwiseFP8Tensor.
        w: ``[N, K]``: BlockwiseFP8Weight, BlockwiseFP8Tensor, or a plain tensor, which is cast in
            128x128 blocks at every call.
        bias: ``[N]``, added in fp32 before the one rounding of the output.
        recipe: for plain ``x`` and ``w``; default: the recipe of the operand that has one.

    Returns:
        ``[..., N]`` in x's dtype, or autocast's where autocast is on.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
    """
    # Every attribute of a subclass would otherwise pass through __torch_function__, 2 us each.
    with torch._C.DisableTorchFunctionSubclass():
        plan = plan_linear(x, w, bias, recipe)
        if plan.casts_x:
            x = x.to(plan.out_dtype)
        call = _Call(plan)
        y: Tensor = (_Linear.apply if plan.traced else _apply_now)(x, w, bias, call)
        if plan.hooked:
            y.grad_fn.register_prehook(call)  # type: ignore[union-attr]
        return y


class _Call:
    """One call of the linear: what its backward needs beside tensors, and the gradient's cast.

    Called before backward begins, where the plan asks for a pre-hook of the node, it replaces the
    incoming gradient by its FP8 forms. The high-precision gradient then dies as soon as it is cast,
    instead of living through dgrad and wgrad: autograd holds a backward's inputs until it returns.
    """

    __slots__ = ("cache", "early", "plan", "w_layout")

    cache: FP8Cache | None
    w_layout: Any

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        # by thread: two may run backward through one graph at once
        self.early: dict[int, _Gradient] = {}

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[None] | None:
        (grad,) = grads
        if grad is None or torch.is_grad_enabled():  # create_graph=True needs the original
            self.early.pop(get_ident(), None)  # of a backward that failed
            return None
        plan = self.plan
        backward = plan.backward(grad)
        row, col = rowwise_block_forms(grad, plan.recipe, *plan.needs, backward.ops)
        self.early[get_ident()] = backward, row, col
        return (None,)


_Gradient: TypeAlias = tuple[Backward, Form | None, Form | None]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        plan = call.plan
        ops, (needs_dx, needs_dw) = plan.ops, plan.needs
        if isinstance(w, BlockwiseFP8Weight):
            w_row, call.cache = w.forms().rowwise(ops), w.cache
            if needs_dx or needs_dw:
                w.cache.before_backward()
        elif isinstance(w, BlockwiseFP8Tensor):
            # Dynamo cannot hand a module to a method of a tensor
            w_row, call.cache = w.rowwise() if plan.traced else w.rowwise(ops), None
        else:
            w_row, call.cache = library.quantize_square(w, plan.recipe.power_of_two), None
        y: Tensor
        x_col: Sequence[Tensor | None] | None
        if plan.fused is not None:
            power_of_two = plan.recipe.power_of_two
            y, *x_col = plan.fused.run(
                as_matrix(x), *w_row, bias, power_of_two, plan.out_dtype, needs_dw
            )
        else:
            x_row, x_col = _forms(x, plan.recipe, True, needs_dw, ops)
            assert x_row is not None
            y = ops.product(*x_row, *w_row, bias, plan.out_dtype)

        call.w_layout = _save(ctx, x_col, w if needs_dx else None, w_row, plan.traced)
        ctx.call = call
        ctx.set_materialize_grads(False)
        if x.ndim == 2:
            return y
        # a plain view made in here could not be modified in place by the caller
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], w.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # may run a checkpointed forward, with all its overrides
        if not torch.is_grad_enabled():
            with torch._C.DisableTorchFunctionSubclass():
                return _linear_backward(ctx, saved, grad)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            grads = _linear_backward(ctx, saved, grad)
        # create_graph=True: let the second derivative say that there is none
        tracked = torch.zeros((), requires_grad=True)
        return tuple(None if g is None else _NoDoubleBackward.apply(g, tracked) for g in grads)


def _linear_backward(
    ctx: Any, saved: Sequence[Tensor], grad: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of what :meth:`_Linear.forward` takes."""
    call: _Call = ctx.call
    plan = call.plan
    early = call.early.pop(get_ident(), None) if plan.hooked else None
    needs_dx, needs_dw, needs_bias, _ = ctx.needs_input_grad
    dx = dw = dbias = None
    if needs_bias and grad is not None:
        dbias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(plan.bias_dtype)
    if not (needs_dx or needs_dw):
        return dx, dw, dbias, None

    x_data, x_scale, *w_tensors = saved
    main_grad = None if call.cache is None else call.cache.main_grad
    if main_grad is not None and needs_dw:
        main_grad, needs_dw = _where_to_add(ctx, main_grad)
    if early is None and grad is not None:
        backward = plan.backward(grad)
        is_whole = needs_dx and needs_dw and main_grad is None
        fused = backward.saved(x_data, x_scale).fused if is_whole else None
        w_row = _weight_of_fused(plan, w_tensors) if fused is not None else None
        if fused is not None and w_row is not None:
            assert call.cache is not None
            call.cache.after_backward()
            power_of_two, dtypes = plan.recipe.power_of_two, (plan.x_like[1], plan.w_like[1])
            dx, dw = fused.run(as_matrix(grad), x_data, x_scale, *w_row, power_of_two, *dtypes)
            return dx.view(plan.x_like[0]), dw, dbias, None
        early = backward, *_forms(grad, plan.recipe, needs_dx, needs_dw, backward.ops)
    w_col = None
    # bytes that were saved, unlike a fresh cast, may have been laid out anew by hooks
    dgrad_ops = library if early is None or call.cache is None else early[0].ops
    if needs_dx and early is not None and not plan.traced:
        # no name for the weight's forms: their bytes must die where the cache lets go of them
        w_col = _saved_forms(call.w_layout, w_tensors, plan.recipe).columnwise(dgrad_ops)
    if call.cache is not None:
        call.cache.after_backward()  # before the GEMM allocates its output
    if early is None:  # nothing came back to this output
        return dx, dw, dbias, None
    backward, g_row, g_col = early
    del early
    if needs_dx:
        assert g_row is not None
        shape, dtype = plan.x_like
        if w_col is None:
            dx = _dgrad_as_one_op(call.w_layout, w_tensors, plan.recipe, g_row, dtype)
        else:
            dx = dgrad_ops.product(*g_row, *w_col, None, dtype)
        dx = dx.view(shape)
        del w_col, g_row
    if needs_dw:
        assert g_col is not None
        if main_grad is not None:
            library.gemm_add_(main_grad, *g_col, x_data, x_scale)
        else:
            ops = backward.saved(x_data, x_scale).ops
            dw = ops.product(*g_col, x_data, x_scale, None, plan.w_like[1])
    return dx, dw, dbias, None


def _where_to_add(ctx: Any, main_grad: Tensor) -> tuple[Tensor | None, bool]:
    """What of ``main_grad`` this backward adds to, and whether the weight's gradient is needed.

    ``needs_input_grad`` says what could be needed. Adding is a side effect: it must not happen for
    ``autograd.grad(y, [x])``, and for ``autograd.grad(y, [w])`` the gradient is to be returned.
    """
    (node, _) = ctx.next_functions[1]
    if not hasattr(node, "variable"):  # a view of the weight: its gradient has a way to go
        return None, True
    try:
        executed = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # its gradient is captured for the caller
        return None, True
    return (main_grad, True) if executed else (None, False)


def _dgrad_as_one_op(
    layout: Any, w_tensors: Sequence[Tensor], recipe: Recipe, g_row: Form, dtype: torch.dtype
) -> Tensor:
    """The data gradient for a compiler, which shall save no form of the weight (``dgrad.py``)."""
    w = w_tensors[0]
    if layout is None and isinstance(w, BlockwiseFP8Weight):
        return dgrad.of_master(*g_row, w.master, w.recipe.power_of_two, dtype)
    forms = _saved_forms(layout, w_tensors, recipe)
    if forms.columnwise_data is not None:
        return library.product(*g_row, *forms.columnwise(), None, dtype)
    return dgrad.of_rowwise(*g_row, *forms.rowwise(), dtype)


def _weight_of_fused(plan: Plan, saved: Sequence[Tensor]) -> Form | None:
    """The rowwise form of the weight, if a backward that is one op may use and forget it."""
    if not plan.small or not isinstance(saved[0], BlockwiseFP8Weight):
        return None  # hooks that offload what is saved may bring a weight back plain
    forms = saved[0].forms()
    keeps = forms.recipe.columnwise == "keep" or forms.columnwise_data is not None
    return None if keeps else forms.rowwise()


# _Linear.apply, but for its preparations for functorch, which would refuse it anyway
_apply_now = super(torch.autograd.Function, _Linear).apply


class _NoDoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, result: Tensor, tracked: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "the second derivative of a blockwise FP8 linear is not implemented: compute that part "
            "of the model in high precision (convert(..., skip=[...]))"
        )


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, recipe: Recipe) -> BlockwiseFP8Tensor:
        return BlockwiseFP8Tensor.quantize(x, ROWWISE_BLOCK, recipe)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def quantize(x: Tensor, recipe: Recipe = DEFAULT_RECIPE) -> BlockwiseFP8Tensor:
    """Cast an activation ``x[..., K]`` once, for several linears to share (q, k, v; gate, up).

    Both forms are made from one read. Differentiable: the gradient passes straight through.

    Args:
        x: bf16, fp16 or fp32, ``[..., K]``.
        recipe: must round scales as the recipe of the weights it will meet.

    Raises:
        TypeError, ValueError: another dtype, or a scalar.
    """
    if isinstance(x, BlockwiseFP8Tensor):
        return x
    return _Quantize.apply(x, recipe)


# Operands


def _forms(
    x: Tensor, recipe: Recipe, rowwise: bool, columnwise: bool, ops: Ops
) -> tuple[Form | None, Form | None]:
    """The forms of an activation or gradient ``[..., K]``, cast now unless it is FP8 already."""
    if isinstance(x, BlockwiseFP8Tensor):
        return x.rowwise() if rowwise else None, x.columnwise() if columnwise else None
    return rowwise_block_forms(x, recipe, rowwise, columnwise, ops)


# Saving. Inner tensors are saved, not wrappers, so that saved-tensor hooks (offloading, activation
# checkpointing) see plain e4m3 and fp32 tensors.


_CAST = "cast"
"""How to read a plain weight again: its cast was saved."""


def _save(
    ctx: Any, x: Sequence[Tensor | None] | None, w: Tensor | None, w_row: Form, traced: bool
) -> Any:
    """Save what backward reads; how to find the FP8 forms of ``w`` in it."""
    data, scale = x or (None, None)
    if w is None or isinstance(w, BlockwiseFP8Weight) or (traced and isinstance(w, FP8Type)):
        ctx.save_for_backward(data, scale, w)
        return None
    if not isinstance(w, BlockwiseFP8Tensor):
        ctx.save_for_backward(data, scale, *w_row)
        return _CAST
    if w.recipe.columnwise == "keep":
        w.columnwise()  # made once, kept by the weight, found by every backward
    names, context = w.__tensor_flatten__()
    ctx.save_for_backward(data, scale, *[getattr(w, name) for name in names])
    return names, context, w.shape, w.stride()


def _saved_forms(layout: Any, w_tensors: Sequence[Tensor], recipe: Recipe) -> Forms:
    if layout is None:
        (w,) = w_tensors
        if isinstance(w, BlockwiseFP8Weight):
            return w.forms()
        if isinstance(w, BlockwiseFP8Tensor):
            return w
        return SquareForms.quantize(w, recipe)  # hooks that offload bring a weight back plain
    if layout is _CAST:
        data, scale = w_tensors
        return SquareForms((data, scale), recipe)
    names, context, shape, stride = layout
    inner = dict(zip(names, w_tensors, strict=True))
    return BlockwiseFP8Tensor.__tensor_unflatten__(inner, context, shape, stride)
