"""The differentiable linear: fprop, dgrad and wgrad in FP8.

::

    fprop  y  = x  · wᵀ    x.rowwise     w.rowwise       1x128 · 128x128
    dgrad  dx = g  · w     g.rowwise     w.columnwise    1x128 · 128x128
    wgrad  dw = gᵀ · x     g.columnwise  x.columnwise    1x128 · 1x128

Saved for backward: the FP8 columnwise form of x, and the weight (whose FP8 form its cache owns).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .ops import checks
from .ops.layouts import ROWWISE_BLOCK, SQUARE_BLOCK, Form
from .ops.library import gemm_forms
from .recipe import DEFAULT_RECIPE, Recipe
from .tensor import BlockwiseFP8Tensor, check_recipes, rowwise_block_forms
from .weight import BlockwiseFP8Weight

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
        recipe = next((t.recipe for t in (w, x) if isinstance(t, _FP8_TYPES)), DEFAULT_RECIPE)
    out_dtype = _check_linear(x, w, bias, recipe)
    if x.dtype != out_dtype and not isinstance(x, BlockwiseFP8Tensor):
        x = x.to(out_dtype)  # as autocast does for every linear; 16-bit casts are also faster
    y = _Linear.apply(x, w, bias, recipe, out_dtype, torch.is_grad_enabled())
    node = y.grad_fn
    keeps_bias_grad = bias is not None and bias.requires_grad
    if node is not None and not keeps_bias_grad and not torch.compiler.is_compiling():
        node.register_prehook(_EarlyGradientCast(recipe, x.requires_grad, w.requires_grad))
    return y


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


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        out_dtype: torch.dtype,
        recorded: bool,
    ) -> Tensor:
        needs_dx, needs_dw = (recorded and needed for needed in ctx.needs_input_grad[:2])
        x_row, x_col = _forms(x, recipe, True, needs_dw)
        assert x_row is not None
        w_fp8 = _fp8_weight(w, recipe)
        y = gemm_forms(x_row, w_fp8.rowwise(), bias, out_dtype)

        saved_w: Tensor | BlockwiseFP8Tensor | None = None
        if needs_dx:
            saved_w = w if isinstance(w, BlockwiseFP8Weight) else w_fp8
        ctx.cache = w.cache if isinstance(w, BlockwiseFP8Weight) else None
        if ctx.cache is not None and (needs_dx or needs_dw):
            ctx.cache.before_backward()
        ctx.weight = _save(ctx, x_col, saved_w)
        ctx.shapes = x.shape, w.shape
        ctx.dtypes = x.dtype, w.dtype, None if bias is None else bias.dtype
        ctx.recipe = recipe
        if x.ndim == 2:
            return y
        # a plain view made in here could not be modified in place by the caller
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], w.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # may run a checkpointed forward, with all its overrides
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            grads = _linear_backward(ctx, saved, grad)
        if torch.is_grad_enabled():  # create_graph=True: let the second derivative say so
            tracked = torch.zeros((), requires_grad=True)
            grads = tuple(None if g is None else _NoDoubleBackward.apply(g, tracked) for g in grads)
        return *grads, None, None, None


def _linear_backward(ctx: Any, saved: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
    needs_dx, needs_dw, needs_bias = ctx.needs_input_grad[:3]
    x_shape, w_shape = ctx.shapes
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    x_col, w = _restore(ctx, saved)
    dx = dw = dbias = None
    if needs_bias:
        dbias = grad.reshape(-1, w_shape[0]).sum(0, dtype=torch.float32).to(bias_dtype)
    if not (needs_dx or needs_dw):
        return dx, dw, dbias

    g_row, g_col = _forms(grad, ctx.recipe, needs_dx, needs_dw)
    w_col = None if w is None else _fp8_weight(w, ctx.recipe).columnwise()
    if ctx.cache is not None:
        ctx.cache.after_backward()  # before the GEMM allocates its output
    if needs_dx:
        assert g_row is not None and w_col is not None
        dx = gemm_forms(g_row, w_col, None, x_dtype).view(x_shape)
        del w_col, g_row
        if isinstance(grad, BlockwiseFP8Tensor):
            grad.release_rowwise()  # made by _EarlyGradientCast for this call alone
    if needs_dw:
        assert g_col is not None
        dw = gemm_forms(g_col, x_col, None, w_dtype)
    return dx, dw, dbias


class _EarlyGradientCast:
    """Replaces a linear's incoming gradient by its FP8 forms before backward begins.

    The high-precision gradient then dies as soon as it is cast, instead of living through dgrad
    and wgrad: autograd holds a backward's inputs until it returns.
    """

    __slots__ = ("columnwise", "recipe", "rowwise")

    def __init__(self, recipe: Recipe, rowwise: bool, columnwise: bool) -> None:
        self.recipe, self.rowwise, self.columnwise = recipe, rowwise, columnwise

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        (grad,) = grads
        if grad is None or torch.is_grad_enabled():  # create_graph=True needs the original
            return None
        fp8 = BlockwiseFP8Tensor.quantize(
            grad, ROWWISE_BLOCK, self.recipe, rowwise=self.rowwise, columnwise=self.columnwise
        )
        return (fp8,)


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


def _fp8_weight(w: Tensor, recipe: Recipe) -> BlockwiseFP8Tensor:
    if isinstance(w, BlockwiseFP8Weight):
        return w.quantized()
    if isinstance(w, BlockwiseFP8Tensor):
        return w
    return BlockwiseFP8Tensor.quantize(w, SQUARE_BLOCK, recipe)


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


def _restore(ctx: Any, saved: Sequence[Tensor]) -> tuple[Form, Tensor | None]:
    x_data, x_scale, *w_tensors = saved
    if ctx.weight is not None:
        names, context, shape, stride = ctx.weight
        inner = dict(zip(names, w_tensors, strict=True))
        w = BlockwiseFP8Tensor.__tensor_unflatten__(inner, context, shape, stride)
        return (x_data, x_scale), w
    return (x_data, x_scale), (w_tensors[0] if w_tensors else None)
