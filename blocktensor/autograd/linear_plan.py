"""The checks and choices of a linear, made once for all linears of a kind.

They depend on shapes, strides, alignment, dtypes, devices, autocast and grad mode, never on values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..ops.devices import lacks_triton
from ..ops.formats import Quantized
from ..ops.runtime.specialize import PLAIN, Specialized, key_of, must_dispatch, recorded
from ..recipe import DEFAULT_RECIPE, Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .check_operands import autocast_dtype, check_linear

FP8_TYPES = (BlockwiseFP8Weight, BlockwiseFP8Tensor)

LARGE_BYTES = 64 << 20
"""Tensors of this size are freed as early as possible in backward, at the cost of host time."""


class Plan:
    """What one kind of linear and one kind of grouped linear have in common.

    Attributes:
        format: of the output's gradient, and of x rowwise.
        x_columnwise: of x columnwise, for the gradient of w; None if that is not asked for, or
            computed in high precision.
        saves_x: whether it is.
        wgrad_input: of the recipe.
        grad_formats: of the output's gradient rowwise and columnwise; None where no product will
            read it.
        weight_format: of a plain weight.
        out_dtype: of the output, and of the input where ``casts_x``.
        casts_x: whether autocast changes the dtype of x.
        needs: whether the gradients of x and w will be asked for.
        tracing: True while a compiler or functorch traces.
        x_shape: of the input.
        x_dtype, w_dtype, bias_dtype: of the operands; None without a bias.
        are_tensors: which of x, w and the bias are tensors.
    """

    __slots__ = ("are_tensors", "bias_dtype", "casts_x", "format", "grad_formats", "needs",
                 "out_dtype", "saves_x", "tracing", "w_dtype", "weight_format", "wgrad_input",
                 "x_columnwise", "x_dtype", "x_shape")  # fmt: skip

    def __init__(
        self, x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe, out_dtype: torch.dtype
    ) -> None:
        self.format, self.weight_format = recipe.activation_format, recipe.weight_format
        self.out_dtype = out_dtype
        # as autocast does for every linear; 16-bit casts are also faster
        self.casts_x = x.dtype != out_dtype and not isinstance(x, BlockwiseFP8Tensor)
        has_graph = torch.is_grad_enabled()
        self.needs = has_graph and x.requires_grad, has_graph and w.requires_grad
        needs_dx, needs_dw = self.needs
        self.wgrad_input = recipe.wgrad_input
        self.x_columnwise = recipe.wgrad_input_format if needs_dw else None
        self.saves_x = needs_dw and self.x_columnwise is None
        self.grad_formats = (
            self.format if needs_dx else None,
            self.format if needs_dw and not self.saves_x else None,
        )
        self.tracing = (
            is_compiling()
            or torch._C._are_functorch_transforms_active()
            or type(inner(x)) not in PLAIN
            or type(inner(w)) not in PLAIN
        )
        self.x_shape, self.x_dtype = x.shape, out_dtype if self.casts_x else x.dtype
        self.w_dtype = w.dtype
        self.bias_dtype = None if bias is None else bias.dtype
        self.are_tensors = True, True, bias is not None


class LinearPlan(Plan):
    """One kind of linear.

    Attributes:
        records_forward: whether forward may run as one recorded sequence of launches.
        records_backward: whether backward may; it then holds its intermediates until it ends.
        fprop: the function that runs forward, once it has been called.
    """

    __slots__ = ("_backwards", "fprop", "records_backward", "records_forward")

    def __init__(
        self, x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe, records: bool = False
    ) -> None:
        """Plan a linear of these operands; ``records``: and of all like them, in eager mode.

        Raises:
            TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
        """
        super().__init__(x, w, bias, recipe, check_linear(x, w, bias, recipe))
        is_cast = isinstance(x, BlockwiseFP8Tensor)
        launches = records and lacks_triton(x.device) is None
        self.records_forward = launches and not is_cast and 0 not in (x.numel(), w.numel())
        self.records_backward = launches and _is_small(x, w) and not self.saves_x
        self.fprop: Callable[..., tuple[Tensor, Quantized | None]] | None = None
        self._backwards: Specialized[Callable[..., tuple[Tensor, Tensor]]] | None = None

    def record_backward(
        self, function: Callable[..., tuple[Tensor, Tensor]], grad: Tensor, x: Quantized
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        """``function``, recorded for gradients and saved inputs like these."""
        if self._backwards is None:
            self._backwards = Specialized(lambda *_: recorded(function))
        x_data, x_scale, _ = x  # hooks may have laid them out anew
        key = (
            (grad.shape, grad.stride(), grad.dtype, grad.data_ptr() & 15),
            (x_scale.stride(), x_data.data_ptr() & 15, x_scale.data_ptr() & 15),
        )
        return self._backwards.find_by(key)


def plan_linear(x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe | None) -> LinearPlan:
    """How ``linear(x, w, bias, recipe=recipe)`` runs.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
    """
    key = key_of_operands(x, w, bias, recipe)
    if key is None:
        return LinearPlan(x, w, bias, recipe_of(x, w, recipe))
    return _PLANS.find_by(key, x, w, bias, recipe)


def key_of_operands(
    x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe | None
) -> Hashable | None:
    """What the plan of eager calls like this depends on; None where each makes its own.

    Raises:
        NotImplementedError: nested tensors, ``torch.jit.trace`` and ``torch.func``.
    """
    if not is_compiling():
        _refuse_surroundings(x)
    x_inner, w_inner = inner(x), inner(w)
    if (
        not isinstance(w, FP8_TYPES)
        or must_dispatch(x_inner)
        or type(w_inner) not in PLAIN
        or w_inner.is_meta
    ):
        return None
    return (  # every eager call builds it
        (x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x_inner.data_ptr() & 15),
        (*x.formats, x.columnwise_data is None, x.source is None)
        if isinstance(x, BlockwiseFP8Tensor)
        else None,
        (w.shape, w.dtype, w.device, w.requires_grad),
        # a trainable weight's FP8 form is always a fresh cast, laid out as its shape says
        (w.cache.format, w.cache.recipe.wgrad_input)
        if isinstance(w, BlockwiseFP8Weight)
        else (key_of(w.operand), w.recipe.wgrad_input),
        None if bias is None else (key_of((bias,)), bias.requires_grad),
        None if recipe is None else (recipe.activation_format, recipe.wgrad_input),
        torch.is_grad_enabled(),
        autocast_dtype(x) if torch._C._is_any_autocast_enabled() else None,
    )


def _refuse_surroundings(x: Tensor) -> None:
    if x.is_nested:
        raise NotImplementedError(
            "an FP8 linear of a nested tensor: call it on .values() of a jagged tensor, or on a "
            "padded one"
        )
    if torch._C._is_tracing():
        raise NotImplementedError(
            "torch.jit.trace of an FP8 linear: freeze the model and use torch.export, or use "
            "torch.compile"
        )
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "an FP8 linear under torch.func (grad, vmap, jvp, jacrev, ...), which has no rule for "
            "it: use torch.autograd, or leave these modules unconverted (convert(..., skip=[...]))"
        )


def recipe_of(x: Tensor, w: Tensor, recipe: Recipe | None) -> Recipe:
    """The recipe of a linear: as given, or that of the operand that has one."""
    if recipe is not None:
        return recipe
    known = w if isinstance(w, FP8_TYPES) else x
    return known.recipe if isinstance(known, FP8_TYPES) else DEFAULT_RECIPE


def inner(x: Any) -> Tensor:
    """A tensor that ``x`` is made of, whose type tells whether it has memory."""
    if type(x) is BlockwiseFP8Weight:
        if is_compiling() or "master" not in x.__dict__:  # a late copy has none
            return x.cast_from
        return x.master
    if isinstance(x, BlockwiseFP8Tensor):
        x = x.columnwise_data if x.rowwise_data is None else x.rowwise_data
    plain: Tensor = x
    return plain


def _is_small(x: Tensor, w: Tensor) -> bool:
    x_rows, largest = math.prod(x.shape[:-1]), LARGE_BYTES // 2
    return 0 < x_rows * w.shape[0] < largest and 0 < w.numel() < largest


def _decide(x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe | None) -> LinearPlan:
    return LinearPlan(x, w, bias, recipe_of(x, w, recipe), records=True)


_PLANS = Specialized(_decide)
