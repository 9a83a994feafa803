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
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .forms import Forms, SquareForms
from .ops import checks
from .ops.layouts import ROWWISE_BLOCK, SQUARE_BLOCK, Form
from .ops.library import gemm_forms
from .recipe import DEFAULT_RECIPE, Recipe
from .tensor import BlockwiseFP8Tensor, check_recipes, rowwise_block_forms
from .weight import BlockwiseFP8Weight, FP8Cache

_FP8_TYPES = (BlockwiseFP8Weight, BlockwiseFP8Tensor)


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
        return _linear(x, w, bias, recipe)


def _linear(x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe | None) -> Tensor:
    if recipe is None:
        known = w if isinstance(w, _FP8_TYPES) else x
        recipe = known.recipe if isinstance(known, _FP8_TYPES) else DEFAULT_RECIPE
    out_dtype = x.dtype if _obviously_fit(x, w, bias, recipe) else None
    if out_dtype is None:
        out_dtype = _check_linear(x, w, bias, recipe)
        if x.dtype != out_dtype and not isinstance(x, BlockwiseFP8Tensor):
            x = x.to(out_dtype)  # as autocast does for every linear; 16-bit casts are also faster
    call = _Call(recipe, out_dtype, torch.is_grad_enabled())
    y: Tensor = _apply(x, w, bias, call)
    keeps_grad = bias is not None and bias.requires_grad  # the bias's gradient sums it
    if y.requires_grad and not keeps_grad and not torch.compiler.is_compiling():
        y.grad_fn.register_prehook(call)  # type: ignore[union-attr]
    return y


def _obviously_fit(x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe) -> bool:
    """Whether :func:`_check_linear` has nothing to say, told by a quick look at the usual case."""
    return (
        bias is None
        and type(w) is BlockwiseFP8Weight
        and w.recipe is recipe
        and w.ndim == 2
        and not isinstance(x, BlockwiseFP8Tensor)
        and x.dtype is w.dtype
        and x.ndim > 0
        and x.shape[-1] == w.shape[1]
        and x.device == w.device
        and not torch._C._is_any_autocast_enabled()
    )


def _check_linear(x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe) -> torch.dtype:
    """Validate the operands of a linear; the output dtype."""
    for tensor, what in ((x, "the input"), (w, "the weight")):
        checks.high_precision(tensor, f"{what} of an FP8 linear")
    checks.rank(w, (2,), "the weight of an FP8 linear", "stacks of experts need grouped_mm")
    if x.ndim == 0:
        raise ValueError("the input of an FP8 linear is a scalar: expected shape [..., K]")
    checks.same_k(x, w, "input", "weight")
    checks.same_device(x, w, "the input", "the weight")
    if isinstance(x, BlockwiseFP8Tensor) and x.block_shape != ROWWISE_BLOCK:
        raise ValueError(
            f"the input of an FP8 linear has blocks of {x.block_shape}: expected {ROWWISE_BLOCK}; "
            f"blocktensor.quantize(x) makes them"
        )
    for tensor in (x, w):
        if isinstance(tensor, _FP8_TYPES):
            check_recipes(recipe, tensor.recipe)
    if bias is not None:
        checks.same_device(x, bias, "the input", "the bias")
        if bias.shape != w.shape[:1]:
            raise ValueError(f"the bias has shape {list(bias.shape)}: expected [{w.shape[0]}]")
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    others = {"weight": w} if bias is None else {"weight": w, "bias": bias}
    for what, other in others.items():
        if other.dtype != x.dtype:
            raise TypeError(
                f"the input is {x.dtype} and the {what} {other.dtype}: convert one of them, or "
                f"run under torch.autocast"
            )
    return x.dtype


class _Call:
    """One call of the linear: what its backward needs beside tensors, and the gradient's cast.

    Called before backward begins (a pre-hook of the node), it replaces the incoming gradient by its
    FP8 forms. The high-precision gradient then dies as soon as it is cast, instead of living
    through dgrad and wgrad: autograd holds a backward's inputs until it returns.
    """

    __slots__ = ("cache", "early", "needs", "out_dtype", "recipe", "recorded", "w_layout", "w_like",
                 "x_like")  # fmt: skip

    cache: FP8Cache | None
    needs: tuple[bool, bool]  # the gradients of x and w
    w_layout: Any
    w_like: tuple[torch.Size, torch.dtype]
    x_like: tuple[torch.Size, torch.dtype]

    def __init__(self, recipe: Recipe, out_dtype: torch.dtype, recorded: bool) -> None:
        self.recipe, self.out_dtype, self.recorded = recipe, out_dtype, recorded
        # by thread: two may run backward through one graph at once
        self.early: dict[int, tuple[Form | None, Form | None]] = {}

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[None] | None:
        (grad,) = grads
        self.early.pop(get_ident(), None)  # of a backward that failed
        if grad is None or torch.is_grad_enabled():  # create_graph=True needs the original
            return None
        self.early[get_ident()] = rowwise_block_forms(grad, self.recipe, *self.needs)
        return (None,)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad[:2] if call.recorded else (False, False)
        x_row, x_col = _forms(x, call.recipe, True, needs_dw)
        assert x_row is not None
        call.cache = w.cache if isinstance(w, BlockwiseFP8Weight) else None
        if call.cache is None and not isinstance(w, BlockwiseFP8Tensor):
            w = BlockwiseFP8Tensor.quantize(w, SQUARE_BLOCK, call.recipe)
        y = gemm_forms(x_row, _fp8_weight(w, call.recipe).rowwise(), bias, call.out_dtype)

        if call.cache is not None and (needs_dx or needs_dw):
            call.cache.before_backward()
        call.w_layout = _save(ctx, x_col, w if needs_dx else None)
        call.x_like = x.shape, x.dtype
        call.w_like = w.shape, w.dtype
        call.needs = needs_dx, needs_dw
        ctx.call = call
        ctx.bias_dtype = None if bias is None else bias.dtype
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
                return *_linear_backward(ctx, saved, grad), None
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            grads = _linear_backward(ctx, saved, grad)
        # create_graph=True: let the second derivative say that there is none
        tracked = torch.zeros((), requires_grad=True)
        grads = tuple(None if g is None else _NoDoubleBackward.apply(g, tracked) for g in grads)
        return *grads, None


def _linear_backward(
    ctx: Any, saved: Sequence[Tensor], grad: Tensor | None
) -> tuple[Tensor | None, ...]:
    call: _Call = ctx.call
    early = call.early.pop(get_ident(), None)
    needs_dx, needs_dw, needs_bias = ctx.needs_input_grad[:3]  # fewer for autograd.grad(y, [x])
    dx = dw = dbias = None
    if needs_bias and grad is not None:
        dbias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    if not (needs_dx or needs_dw):
        return dx, dw, dbias

    if early is None and grad is not None:
        early = _forms(grad, call.recipe, needs_dx, needs_dw)
    x_col, w = _restore(call.w_layout, saved)
    w_col = None
    if needs_dx and w is not None and early is not None:
        w_col = _fp8_weight(w, call.recipe).columnwise()
    if call.cache is not None:
        call.cache.after_backward()  # before the GEMM allocates its output
    if early is None:  # nothing came back to this output
        return dx, dw, dbias
    g_row, g_col = early
    del early
    if needs_dx:
        assert g_row is not None and w_col is not None
        shape, dtype = call.x_like
        dx = gemm_forms(g_row, w_col, None, dtype)
        if len(shape) != 2:
            dx = dx.view(shape)
        del w_col, g_row
    if needs_dw:
        assert g_col is not None
        dw = gemm_forms(g_col, x_col, None, call.w_like[1])
    return dx, dw, dbias


def _apply(*args: Any) -> Tensor:
    """``_Linear.apply``, but for its preparations for functorch, which would refuse it anyway."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return _Linear.apply(*args)
    return _apply_now(*args)


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
    x: Tensor, recipe: Recipe, rowwise: bool, columnwise: bool
) -> tuple[Form | None, Form | None]:
    """The forms of an activation or gradient ``[..., K]``, cast now unless it is FP8 already."""
    if isinstance(x, BlockwiseFP8Tensor):
        return x.rowwise() if rowwise else None, x.columnwise() if columnwise else None
    return rowwise_block_forms(x, recipe, rowwise, columnwise)


def _fp8_weight(w: Tensor, recipe: Recipe) -> Forms:
    if isinstance(w, BlockwiseFP8Weight):
        return w.forms()
    if isinstance(w, BlockwiseFP8Tensor):
        return w
    return SquareForms(w, recipe)  # hooks that offload what is saved bring a weight back plain


# Saving. Inner tensors are saved, not wrappers, so that saved-tensor hooks (offloading, activation
# checkpointing) see plain e4m3 and fp32 tensors.


def _save(ctx: Any, x: Form | None, w: Tensor | None) -> tuple[list[str], Any, Any, Any] | None:
    layout, w_tensors = None, []
    if isinstance(w, BlockwiseFP8Tensor):
        names, context = w.__tensor_flatten__()
        layout = names, context, w.shape, w.stride()
        w_tensors = [getattr(w, name) for name in names]
    elif w is not None:
        w_tensors = [w]
    ctx.save_for_backward(*(x or (None, None)), *w_tensors)
    return layout


def _restore(layout: Any, saved: Sequence[Tensor]) -> tuple[Form, Tensor | None]:
    x_data, x_scale, *w_tensors = saved
    if layout is not None:
        names, context, shape, stride = layout
        inner = dict(zip(names, w_tensors, strict=True))
        w = BlockwiseFP8Tensor.__tensor_unflatten__(inner, context, shape, stride)
        return (x_data, x_scale), w
    return (x_data, x_scale), (w_tensors[0] if w_tensors else None)
