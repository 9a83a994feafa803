"""The differentiable linear: fprop, dgrad and wgrad in FP8, and the overrides that lead to it.

::

    fprop  y  = x  · wᵀ    x.rowwise     w.rowwise       1x128 · 128x128
    dgrad  dx = g  · w     g.rowwise     w.columnwise    1x128 · 128x128
    wgrad  dw = gᵀ · x     g.columnwise  x.columnwise    1x128 · 1x128

Saved for backward: the FP8 columnwise form of x, and the weight (whose FP8 form its cache owns).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .ops import checks
from .ops.layouts import ROWWISE_BLOCK, SQUARE_BLOCK
from .recipe import DEFAULT_RECIPE, Recipe
from .tensor import TORCH_FUNCTIONS, BlockwiseFP8Tensor, Form, scaled_mm
from .weight import BlockwiseFP8Weight


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
    recipe = recipe or next(
        (t.recipe for t in (w, x) if isinstance(t, (BlockwiseFP8Weight, BlockwiseFP8Tensor))),
        DEFAULT_RECIPE,
    )
    out_dtype = _check_linear(x, w, bias)
    y = _Linear.apply(x, w, bias, recipe, out_dtype)
    node = y.grad_fn
    keeps_bias_grad = bias is not None and bias.requires_grad
    if node is not None and not keeps_bias_grad and not torch.compiler.is_compiling():
        node.register_prehook(_EarlyGradientCast(recipe, x.requires_grad, w.requires_grad))
    return y


def _check_linear(x: Tensor, w: Tensor, bias: Tensor | None) -> torch.dtype:
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
    if bias is not None:
        checks.same_device(x, bias, "the input", "the bias")
        if bias.shape != w.shape[:1]:
            raise ValueError(f"the bias has shape {list(bias.shape)}: expected [{w.shape[0]}]")
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    for tensor, what in ((w, "weight"), (bias, "bias")):
        if tensor is not None and tensor.dtype != x.dtype:
            raise TypeError(
                f"the input is {x.dtype} and the {what} {tensor.dtype}: convert one of them, or "
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
    ) -> Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        x_fp8 = _quantize_input(x, recipe, columnwise=needs_dw)
        w_fp8 = _quantize_weight(w, recipe)
        y = scaled_mm(_as_matrix(x_fp8), w_fp8.t(), bias=bias, out_dtype=out_dtype)

        saved_x = x_fp8.columnwise() if needs_dw else None
        saved_w: Tensor | BlockwiseFP8Tensor | None = None
        if needs_dx:
            saved_w = w if isinstance(w, BlockwiseFP8Weight) else w_fp8
        ctx.weight = _save(ctx, saved_x, saved_w)
        ctx.shapes = x.shape, w.shape
        ctx.dtypes = x.dtype, w.dtype, None if bias is None else bias.dtype
        ctx.recipe = recipe
        return y.view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = _linear_backward(ctx, grad)
        if torch.is_grad_enabled():  # create_graph=True: let the second derivative say so
            grads = tuple(None if g is None else _NoDoubleBackward.apply(g, grad) for g in grads)
        return *grads, None, None


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs_dx, needs_dw, needs_bias = ctx.needs_input_grad[:3]
    x_shape, w_shape = ctx.shapes
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    saved_x, w = _restore(ctx)
    dx = dw = dbias = None
    if needs_bias:
        dbias = grad.reshape(-1, w_shape[0]).sum(0, dtype=torch.float32).to(bias_dtype)
    if not (needs_dx or needs_dw):
        return dx, dw, dbias

    g = _as_matrix(_quantize_gradient(grad, ctx.recipe, needs_dx, needs_dw))
    if needs_dx:
        w_fp8 = _quantize_weight(w, ctx.recipe).columnwise_only()
        if isinstance(w, BlockwiseFP8Weight):
            w.cache.after_backward()  # before the GEMM allocates its output
        dx = scaled_mm(g, w_fp8, out_dtype=x_dtype).view(x_shape)
        del w_fp8
        if isinstance(grad, BlockwiseFP8Tensor):
            grad.release_rowwise()  # made by _EarlyGradientCast for this call alone
        g.release_rowwise()
    if needs_dw:
        x = BlockwiseFP8Tensor(
            None,
            saved_x,
            shape=(math.prod(x_shape[:-1]), x_shape[-1]),
            dtype=x_dtype,
            block_shape=ROWWISE_BLOCK,
            recipe=ctx.recipe,
        )
        dw = scaled_mm(g.t(), x, out_dtype=w_dtype)
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
        return (_quantize_gradient(grad, self.recipe, self.rowwise, self.columnwise),)


class _NoDoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, result: Tensor, grad: Tensor) -> Tensor:
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


def _quantize_input(x: Tensor, recipe: Recipe, *, columnwise: bool) -> BlockwiseFP8Tensor:
    if isinstance(x, BlockwiseFP8Tensor):
        return x
    return BlockwiseFP8Tensor.quantize(x, ROWWISE_BLOCK, recipe, columnwise=columnwise)


def _quantize_gradient(
    grad: Tensor, recipe: Recipe, rowwise: bool, columnwise: bool
) -> BlockwiseFP8Tensor:
    if isinstance(grad, BlockwiseFP8Tensor):
        return grad
    return BlockwiseFP8Tensor.quantize(
        grad, ROWWISE_BLOCK, recipe, rowwise=rowwise, columnwise=columnwise
    )


def _quantize_weight(w: Tensor, recipe: Recipe) -> BlockwiseFP8Tensor:
    if isinstance(w, BlockwiseFP8Weight):
        return w.quantized()
    if isinstance(w, BlockwiseFP8Tensor):
        return w
    return BlockwiseFP8Tensor.quantize(w, SQUARE_BLOCK, recipe)


def _as_matrix(x: BlockwiseFP8Tensor) -> BlockwiseFP8Tensor:
    """Leading dimensions flattened: ``[..., K]`` to ``[M, K]``; no data moves."""
    if x.ndim == 2:
        return x
    return x.relabel(shape=(math.prod(x.shape[:-1]), x.shape[-1]))


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


def _restore(ctx: Any) -> tuple[Form, Tensor | None]:
    x_data, x_scale, *w_tensors = ctx.saved_tensors
    if ctx.weight is not None:
        names, context, shape, stride = ctx.weight
        inner = dict(zip(names, w_tensors, strict=True))
        w = BlockwiseFP8Tensor.__tensor_unflatten__(inner, context, shape, stride)
        return (x_data, x_scale), w
    return (x_data, x_scale), (w_tensors[0] if w_tensors else None)


# Overrides above autograd. matmul(a, b) is linear(a, b.t()): for FP8 operands t() is a relabelling.


def _overrides(*functions: Any) -> Callable[[Any], Any]:
    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            TORCH_FUNCTIONS[function] = implementation
        return implementation

    return register


@_overrides(F.linear)
def _linear_override(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if isinstance(input, BlockwiseFP8Weight):
        input = input.master
    return linear(input, weight, bias)


@_overrides(torch.mm, Tensor.mm, torch.matmul, Tensor.matmul, Tensor.__matmul__)
def _matmul_override(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    if out is not None:
        raise NotImplementedError("FP8 products return a new tensor: out= is not supported")
    if other.ndim == 2 and not isinstance(input, BlockwiseFP8Weight):
        return linear(input, other.t())
    if input.ndim == 2 and other.ndim == 2:  # a weight on the left: (bᵀ wᵀ)ᵀ
        return linear(other.t(), input).t()
    raise NotImplementedError(
        f"matmul of {list(input.shape)} by {list(other.shape)} has no FP8 path: the right operand "
        f"must be a matrix [K, N] (stacks of experts need grouped_mm); call .dequantize(), or use "
        f".master of a BlockwiseFP8Weight, to compute in high precision"
    )


@_overrides(Tensor.__rmatmul__)
def _rmatmul_override(self: Tensor, other: Tensor) -> Tensor:
    return _matmul_override(other, self)


@_overrides(torch.addmm, Tensor.addmm)
def _addmm_override(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Any = None
) -> Tensor:
    if (
        input.ndim == 1
        and beta == 1
        and alpha == 1
        and out is None
        and not (isinstance(mat1, BlockwiseFP8Weight))
    ):
        return linear(mat1, mat2.t(), input)
    product = _matmul_override(mat1, mat2, out=out)
    return product.mul(alpha).add(input, alpha=beta)


def _no_grouped_mm(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("grouped_mm over FP8 experts is not implemented yet")


for _function in ("_grouped_mm", "grouped_mm"):
    for _namespace in (torch, F):
        if hasattr(_namespace, _function):
            TORCH_FUNCTIONS[getattr(_namespace, _function)] = _no_grouped_mm
