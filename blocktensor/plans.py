"""What a linear checks and chooses, decided once for all linears of a kind.

Which ops run, and whether the operands fit, depends on shapes, strides, alignment, dtypes, devices,
autocast and ``BLOCKTENSOR_GEMM``, never on values. A linear of a known kind finds it all under one
key, its backward under another, and looks nothing up op by op.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .ops import checks, fused, library
from .ops.backends import forced
from .ops.fused import Sequence
from .ops.layouts import ROWWISE_BLOCK
from .ops.pinned import Ops, Pinned
from .ops.prepared import remember
from .recipe import DEFAULT_RECIPE, Recipe
from .tensor import BlockwiseFP8Tensor, check_recipes
from .weight import BlockwiseFP8Weight

EARLY_BYTES = 64 << 20
"""Incoming gradients of this size are cast before backward begins, and die then. The hook that does
it takes a tenth of a small linear's host time, and a small gradient may as well live a little."""

_FP8_TYPES = (BlockwiseFP8Weight, BlockwiseFP8Tensor)


class Plan:
    """One kind of linear.

    Attributes:
        recipe: of a kind, all recipes round scales alike.
        out_dtype: of the product, and of the input where ``casts_x``.
        needs: whether the gradients of x and w will be asked for.
        hooked: whether the incoming gradient is cast before backward begins.
        ops: for the forward.
        small: whether each direction may run as one op: nobody sees the ops, and what they hold
            counts less than host time.
        fused: the forward as one op, if it may be one.
        pinned: whether it serves all calls of the kind, whose ops nobody sees.
        traced: whether a compiler or functorch looks on.
        bias_dtype: None without a bias.
        x_like, w_like: shapes and dtypes.
    """

    __slots__ = ("_backwards", "bias_dtype", "casts_x", "fused", "hooked", "needs", "ops",
                 "out_dtype", "pinned", "recipe", "small", "traced", "w_like",
                 "x_like")  # fmt: skip

    def __init__(
        self, x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe, pinned: bool
    ) -> None:
        """Plan a linear of these operands, and of all like them if ``pinned``.

        Raises:
            TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
        """
        self.recipe, self.pinned = recipe, pinned
        self.out_dtype = _check(x, w, bias, recipe)
        # as autocast does for every linear; 16-bit casts are also faster
        self.casts_x = x.dtype != self.out_dtype and not isinstance(x, BlockwiseFP8Tensor)
        recorded = torch.is_grad_enabled()
        self.needs = recorded and x.requires_grad, recorded and w.requires_grad
        sums_grad = bias is not None and bias.requires_grad  # which then has to stay
        self.traced = (
            is_compiling()
            or torch._C._are_functorch_transforms_active()
            or not (library.is_real(_inside(x)) and library.is_real(_inside(w)))
        )
        grad_bytes = math.prod(x.shape[:-1]) * w.shape[0] * self.out_dtype.itemsize
        fits_hook = not (sums_grad or self.traced)
        self.hooked = any(self.needs) and fits_hook and grad_bytes >= EARLY_BYTES
        self.bias_dtype = None if bias is None else bias.dtype
        self.x_like = x.shape, self.out_dtype if self.casts_x else x.dtype
        self.w_like = w.shape, w.dtype
        self.ops: Ops = Pinned() if pinned else library
        self.small = pinned and _small(x, w)
        is_cast = isinstance(x, BlockwiseFP8Tensor)
        self.fused = Sequence(fused.forward, 1) if self.small and not is_cast else None
        self._backwards: dict[Hashable, Backward] = {}

    def backward(self, grad: Tensor) -> Backward:
        """The ops of a backward that begins with ``grad``."""
        if not self.pinned or library.must_be_seen(grad):
            return _SEEN
        kind = grad.shape, grad.stride(), grad.dtype, grad.data_ptr() & 15, forced()
        found = self._backwards.get(kind)
        return remember(self._backwards, kind, Backward(True)) if found is None else found


class Backward:
    """The backward for gradients of one kind; ``ops``: for all of it but wgrad's product."""

    __slots__ = ("_saved", "ops")

    def __init__(self, pinned: bool) -> None:
        self.ops: Ops = Pinned() if pinned else library
        self._saved: dict[Hashable, Saved] | None = {} if pinned else None

    def saved(self, data: Tensor, scale: Tensor) -> Saved:
        """What depends on how hooks may have laid out anew what was saved of x."""
        if self._saved is None:
            return _LIBRARY
        kind = scale.stride(), data.data_ptr() & 15, scale.data_ptr() & 15
        found = self._saved.get(kind)
        return remember(self._saved, kind, Saved(Pinned())) if found is None else found


class Saved:
    """For one layout of what was saved: ops for wgrad's product, and the backward as one op."""

    __slots__ = ("fused", "ops")

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.fused = None if ops is library else Sequence(fused.backward, 2)


_LIBRARY = Saved(library)
_SEEN = Backward(False)
_PLANS: dict[Hashable, Plan] = {}


def plan_linear(x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe | None) -> Plan:
    """How ``linear(x, w, bias, recipe=recipe)`` runs.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
    """
    if (
        not isinstance(w, _FP8_TYPES)
        or library.must_be_seen(_inside(x))
        or library.must_be_seen(_inside(w))
        or torch._C._are_functorch_transforms_active()
    ):
        return Plan(x, w, bias, _recipe(x, w, recipe), pinned=False)
    kind = (
        _kind_of(x),
        _kind_of(w),
        None if recipe is None else recipe.scale,
        None if bias is None else _kind_of(bias),
        torch.is_grad_enabled(),
        autocast_dtype(x) if torch._C._is_any_autocast_enabled() else None,
        forced(),
    )
    found = _PLANS.get(kind)
    if found is None:
        found = remember(_PLANS, kind, Plan(x, w, bias, _recipe(x, w, recipe), pinned=True))
    return found


def _small(x: Tensor, w: Tensor) -> bool:
    """Whether what a linear holds a little longer, if it runs as one op, is small."""
    x_rows, largest = math.prod(x.shape[:-1]), EARLY_BYTES // 2
    return 0 < x_rows * w.shape[0] < largest and x.numel() > 0 and 0 < w.numel() < largest


def _inside(x: Tensor) -> Tensor:
    """A tensor that ``x`` is made of, whose type tells whether it is real."""
    if type(x) is BlockwiseFP8Weight:
        return x.master
    if type(x) is BlockwiseFP8Tensor:
        inside = x.columnwise_data if x.rowwise_data is None else x.rowwise_data
        assert inside is not None
        return inside
    return x


def _kind_of(x: Tensor) -> Hashable:
    """What of an operand a plan depends on."""
    known = x.shape, x.dtype, x.device, x.requires_grad
    if type(x) is BlockwiseFP8Weight:
        # little of it: its FP8 bytes are always a fresh cast, laid out as its shape says
        return known, x.cache.recipe.scale
    if type(x) is BlockwiseFP8Tensor:
        parts = x.rowwise_data, x.rowwise_scale, x.columnwise_data, x.columnwise_scale
        layouts = [t if t is None else (t.shape, t.stride(), t.data_ptr() & 15) for t in parts]
        return known, x.recipe.scale, x.block_shape, *layouts
    return known, x.stride(), x.data_ptr() & 15


def _recipe(x: Tensor, w: Tensor, recipe: Recipe | None) -> Recipe:
    if recipe is not None:
        return recipe
    known = w if isinstance(w, _FP8_TYPES) else x
    return known.recipe if isinstance(known, _FP8_TYPES) else DEFAULT_RECIPE


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast makes of ``x``; None where it is off."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # which refuses to be asked for meta
        return torch.get_autocast_dtype(kind)
    return None


def _check(x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe) -> torch.dtype:
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
    autocast = autocast_dtype(x)
    if autocast is not None:
        return autocast
    others = {"weight": w} if bias is None else {"weight": w, "bias": bias}
    for what, other in others.items():
        if other.dtype != x.dtype:
            raise TypeError(
                f"the input is {x.dtype} and the {what} {other.dtype}: convert one of them, or "
                f"run under torch.autocast"
            )
    return x.dtype
