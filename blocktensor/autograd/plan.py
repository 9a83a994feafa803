"""The checks and choices of a matmul, made once for all calls of a kind.

They depend on shapes, strides, alignment, dtypes, devices, autocast and grad mode, not on values.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from ..ops import checks
from ..ops.formats import GROUP_STEP, ROW_STEP
from ..ops.linear_layer import ops
from ..ops.runtime import check_recordings
from ..ops.runtime.launch import this_thread
from ..ops.runtime.specialize import PLAIN, Decisions, must_dispatch
from ..patches import COMPILE_CACHE_KEY
from ..recipe import DEFAULT_RECIPE, Recipe
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.refusals import check_grid, check_scaling, refuse_torch_func
from ..tensor.weight import FP8_TYPES, BlockwiseFP8Weight
from ..tensor.weight_cache import ONE_READ_BYTES, FP8Cache
from .pipelining import LOSES_GRAPHS, watch_halves

LARGE_BYTES = ops.LARGE_BYTES
"""Tensors of this size are freed as early as possible in backward, at the cost of host time."""


RECORDED_DEVICES = ("cuda",)
"""Devices on which matmuls launch Triton kernels, which are recorded and repeated."""


class Plan:
    """The checks and choices of one kind of linear layer or grouped linear layer.

    Attributes:
        format: of x rowwise.
        grad_format: of the output's gradient, rowwise and columnwise.
        x_columnwise: format of x columnwise, which wgrad reads; None if no gradient of w is wanted,
            or if wgrad runs in high precision.
        saves_x, saves_rows: save x itself, or its rowwise form, for a wgrad in high precision.
        plain_wgrad, plain_dgrad: True if wgrad or dgrad runs in high precision.
        reads_master: True if dgrad reads the weight itself, not the values of its FP8 form.
        wgrad_input: format of x columnwise if a gradient of w were wanted; None in high precision.
        batch_invariant: of the recipe.
        grad_formats: rowwise and columnwise formats of the output's gradient; None where no matmul
            reads that form.
        weight_format: of casts of the weight as ``[..., N, K]``.
        out_dtype: of the output, and of the input where ``casts_x``.
        derives_x: True if x is FP8 and the columnwise form that wgrad reads is derived.
        records_rows: True if x is FP8 already, and matmuls of its bytes may be recorded.
        casts_x: True if autocast changes the dtype of x.
        needs: whether gradients of x and of w may be wanted.
        tracing: True while a compiler traces.
        x_dtype, w_dtype, bias_dtype: of the operands; None without a bias.
        are_tensors: which of x, w, the bias and ``offs`` are tensors.
        casts_weight: True if the recorded forward also casts the weight.
        w_is_transposed: True if a stack ``[E, N, K]`` lies in memory as ``[E, K, N]``; its gradient
            is then computed as ``[E, K, N]`` too, which needs no copy.
        records_forward: True if forward may run as one recorded sequence of launches.
        records_backward: True if backward may run as one recorded sequence; it then holds its
            intermediates until it ends.
        is_cached: True if later eager calls of this kind use this plan.
    """

    def __init__(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        recipe: Recipe | None,
        offs: Tensor | None = None,
        is_cached: bool = True,
    ) -> None:
        """Plan a matmul of these operands.

        Raises:
            TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
        """
        recipe = recipe_of(x, w, recipe)
        self.is_cached = is_cached
        self.out_dtype = out_dtype = _checked_output_dtype(x, w, bias, recipe, offs)
        is_cast = isinstance(x, BlockwiseFP8Tensor)
        self.format, self.weight_format = recipe.activation_format, recipe.weight_format_nk
        self.grad_format = recipe.gradient_format
        # as autocast does for every linear layer; 16-bit casts are also faster
        self.casts_x = x.dtype != out_dtype and not is_cast
        has_graph = torch.is_grad_enabled()
        self.needs = needs_dx, needs_dw = (
            has_graph and x.requires_grad,
            has_graph and w.requires_grad,
        )
        self.batch_invariant = recipe.batch_invariant
        self.w_is_transposed = offs is not None and w.stride(1) == 1 != w.stride(2)
        self.wgrad_input = (
            recipe.wgrad_input_format_kn if self.w_is_transposed else recipe.wgrad_input_format
        )
        self.x_columnwise = self.wgrad_input if needs_dw else None
        self.derives_x = self.x_columnwise is not None and derives_columnwise(x, offs)
        self.plain_wgrad = needs_dw and self.x_columnwise is None
        self.plain_dgrad = needs_dx and recipe.backward != "fp8"
        self.reads_master = recipe.backward == "high_precision"
        self.saves_rows = self.plain_wgrad and recipe.wgrad_input == "dequantized"
        self.saves_x = self.plain_wgrad and not self.saves_rows
        self.grad_formats = (
            self.grad_format if needs_dx and not self.plain_dgrad else None,
            self.grad_format if needs_dw and not self.plain_wgrad else None,
        )
        self.tracing = (
            is_compiling()  # functorch was refused earlier
            or type(inner(x)) not in PLAIN
            or type(inner(w)) not in PLAIN
        )
        self.x_dtype = out_dtype if self.casts_x else x.dtype
        self.w_dtype = w.dtype
        self.bias_dtype = None if bias is None else bias.dtype
        self.are_tensors = True, True, bias is not None, offs is not None
        records = is_cached and may_record(x)
        self.records_rows = records and is_cast
        self.records_forward = (
            records
            and not (is_cast or self.saves_rows or self.plain_dgrad)
            and 0 not in (x.numel(), w.numel())
        )
        self.casts_weight = (
            self.records_forward
            and needs_dx
            and isinstance(w, BlockwiseFP8Weight)
            and type(w.cache) is FP8Cache
            and w.cache.format is self.weight_format
            and bool(w.recipe.cache_weight)
            and not w.transposed
            and w.numel() <= ONE_READ_BYTES
        )
        in_fp8 = not (self.plain_wgrad or self.plain_dgrad)
        self.records_backward = records and in_fp8 and _is_small(x, w, offs)


def may_record(x: Tensor) -> bool:
    """Return True if matmuls with ``x`` launch Triton kernels, which are recorded and repeated."""
    return x.device.type in RECORDED_DEVICES


def plan_matmul(
    x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe | None, offs: Tensor | None = None
) -> Plan:
    """Return the plan of ``linear(x, w, bias)`` or, with ``offs``, of ``grouped_linear``.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
        NotImplementedError: nested tensors, ``torch.jit.trace`` and ``torch.func``.
    """
    key = _key(x, w, bias, recipe, offs)
    if key is None:
        return Plan(x, w, bias, recipe, offs, is_cached=False)
    plan = _PLANS.get(key) or _PLANS.put(key, Plan(x, w, bias, recipe, offs))
    if check_recordings.ENABLED:
        anew = Plan(x, w, bias, recipe, offs)
        check_recordings.check_plan(plan, anew)
    return plan


_PLANS = Decisions[Plan]()


def _key(
    x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe | None, offs: Tensor | None
) -> Hashable | None:
    """Return all that the plan of an eager call depends on; None if each call needs its own plan.

    A plan depends on no addresses, on no strides except of a stack, and on the number of rows in
    steps. Recorded launches, which depend on more, have their own keys
    (:func:`~..ops.runtime.specialize.key_of`). ``check_recordings.py`` compares plans.

    Raises:
        NotImplementedError: nested tensors, ``torch.jit.trace`` and ``torch.func``.
    """
    if is_compiling():
        _name_our_code()
        if not is_dynamo_compiling():  # ops run on fake tensors
            _refuse_functorch()
    else:
        _refuse_surroundings(x)
        if LOSES_GRAPHS:
            watch_halves()
    rows, x_inner, w_inner = _in_steps(x, offs), inner(x), inner(w)
    if (
        not isinstance(w, FP8_TYPES)
        or must_dispatch(x_inner)
        or this_thread.watch is not None
        or type(w_inner) not in PLAIN
    ):
        return None
    weight_key: Hashable
    if isinstance(w, BlockwiseFP8Weight):
        weight_key = type(w.cache), w.cache.format, w.transposed, w.cache.recipe
    else:
        weight_key = w.format, w.recipe
    return (  # every eager call builds it
        (rows, x.shape[-1:], x.ndim),
        (x.dtype, x.device, x.requires_grad),
        (*x.formats, x.rowwise_data is None, x.columnwise_data is None, x.source is None)
        if isinstance(x, BlockwiseFP8Tensor)
        else None,
        (w.shape, w.dtype, w.device, w.requires_grad),
        weight_key,
        None if bias is None else (bias.shape, bias.dtype, bias.device, bias.requires_grad),
        recipe,
        torch.is_grad_enabled(),
        autocast_dtype(x) if torch._C._is_any_autocast_enabled() else None,
        None if offs is None else (w.stride(), offs.shape, offs.dtype, offs.device),
    )


def _name_our_code() -> None:
    """Make this package's code a part of torch's compile cache key; there may be no FP8 tensor."""
    COMPILE_CACHE_KEY.apply()


_name_our_code._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs while traced


def _refuse_surroundings(x: Tensor) -> None:
    if x.is_nested:
        raise NotImplementedError(
            "an FP8 linear layer of a nested tensor: call it on .values() of a jagged tensor, or "
            "on a padded one"
        )
    if torch._C._is_tracing():
        raise NotImplementedError(
            "torch.jit.trace of an FP8 linear layer: freeze the model and use torch.export, or use "
            "torch.compile"
        )
    _refuse_functorch()


def _refuse_functorch() -> None:
    if torch._C._are_functorch_transforms_active():
        refuse_torch_func()


def recipe_of(x: Tensor, w: Tensor, recipe: Recipe | None) -> Recipe:
    """Return the given recipe, or else the recipe of the operand that has one."""
    if recipe is not None:
        return recipe
    known = w if isinstance(w, FP8_TYPES) else x
    return known.recipe if isinstance(known, FP8_TYPES) else DEFAULT_RECIPE


def difference_of(recipes: Sequence[Recipe]) -> str:
    """Return the first setting of casts that differs between recipes, with its values."""
    for setting in ("scale", "wgrad_input", "backward", "weight_grid"):
        values = dict.fromkeys([getattr(recipe, setting) for recipe in recipes])
        if len(values) > 1:
            return f"{setting}={' and '.join(map(repr, values))}"
    return ""


def inner(x: Any) -> Tensor:
    """Return an inner tensor of ``x``: its type tells if ``x`` has memory."""
    if type(x) is BlockwiseFP8Weight:
        if is_compiling() or "master" not in x.__dict__:  # a late copy has no inner tensor yet
            return x._cast_from
        return x.master
    if isinstance(x, BlockwiseFP8Tensor):
        x = x.columnwise_data if x.rowwise_data is None else x.rowwise_data
    plain: Tensor = x
    return plain


def _in_steps(x: Tensor, offs: Tensor | None) -> int:
    """Return the rows of ``x[..., K]``, rounded up to the step of recorded calls."""
    rows = math.prod(x.shape[:-1])
    step = ROW_STEP if offs is None else GROUP_STEP
    return -(-rows // step) * step  # without another call: every eager call builds a key


def _is_small(x: Tensor, w: Tensor, offs: Tensor | None) -> bool:
    largest = LARGE_BYTES // 2
    return 0 < _in_steps(x, offs) * w.shape[-2] < largest and 0 < w.numel() < largest


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts ``x``; None if autocast is off."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # is_autocast_enabled raises for meta
        return torch.get_autocast_dtype(kind)
    return None


def _checked_output_dtype(
    x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe, offs: Tensor | None
) -> torch.dtype:
    """Check the operands, and return the dtype of the output.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or recipes that do not fit together.
    """
    checks.linear_operands(x, w, bias, offs)
    _refuse_export(w)
    _check_blocks(x, w, recipe)
    if isinstance(x, BlockwiseFP8Tensor) and torch.is_grad_enabled() and w.requires_grad:
        _check_wgrad_input(x, recipe, offs)
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


def _refuse_export(w: Tensor) -> None:
    """Refuse a trainable weight in ``torch.export``: see :func:`refuse_export`."""
    refuse_export(
        f"an FP8 linear layer whose weight {list(w.shape)} is trained",
        "Call blocktensor.freeze(model) before, or export under torch.no_grad() a program that "
        "casts the weights of every call and is not trained. ONNX has no such casts: for it, load "
        "model.state_dict() into a model that is not converted, and export that",
        w,
    )


def refuse_export(what: str, remedy: str, *operands: Tensor) -> None:
    """Refuse operands in ``torch.export``: the exported program would give them no gradient.

    Raises:
        NotImplementedError: one of them requires a gradient, and gradients are recorded.
    """
    # the flag itself: in torch 2.11 is_exporting() is True in all compiled code
    if not (torch.compiler._is_exporting_flag and torch.is_grad_enabled()):
        return
    if any(x.requires_grad for x in operands):
        raise NotImplementedError(
            f"torch.export of {what}: the program would have no gradient of it. {remedy}"
        )


def _check_blocks(x: Tensor, w: Tensor, recipe: Recipe) -> None:
    expected = recipe.activation_format.block_shape
    if isinstance(x, BlockwiseFP8Tensor) and x.rowwise_format.block_shape != expected:
        raise ValueError(
            f"the input of an FP8 linear layer has blocks of {x.rowwise_format.block_shape}: "
            f"expected {expected}; blocktensor.quantize(x) makes them"
        )
    formats = [t.format for t in (x, w) if isinstance(t, FP8_TYPES)]
    for format in formats:
        check_scaling(recipe, format)
    if isinstance(w, BlockwiseFP8Weight):
        check_grid(w, recipe, w.transposed)
    elif getattr(w, "generation", None) is not None:  # FSDP2 has gathered it
        check_grid(w, recipe, w.stride(-1) != 1)
    if w.ndim == 3 and isinstance(w, BlockwiseFP8Tensor) and not w.format.transposes:
        raise ValueError(
            f"the weight of a grouped FP8 linear layer has blocks of {w.block_shape}: expected "
            f"{recipe.weight_format.block_shape}"
        )


def derives_columnwise(x: Tensor, offs: Tensor | None = None) -> bool:
    """Return True if ``x`` is FP8, and its columnwise form is derived from its rowwise one.

    Blocks that ``x`` holds columnwise ignore groups that end at ``offs``.
    """
    return (
        isinstance(x, BlockwiseFP8Tensor)
        and x.rowwise_data is not None
        and x.rowwise_format.rows == 1
        and x.rowwise_format.power_of_two
        and (offs is not None or x.columnwise_data is None)
    )


def _check_wgrad_input(x: BlockwiseFP8Tensor, recipe: Recipe, offs: Tensor | None) -> None:
    """Check that ``x`` holds what wgrad reads, or what it can be derived from."""
    wanted = recipe.wgrad_input_format
    if recipe.wgrad_input == "dequantized":  # it reads what fprop reads
        return
    if wanted is not None and x.prepared is None and x.source is None:
        if derives_columnwise(x, offs):
            return
        in_powers = "Recipe(scale=Scales(activations='power_of_two'))"
        if offs is not None:
            raise ValueError(
                f"the input {list(x.shape)} of a grouped FP8 linear layer is FP8 already, and its "
                f"columnwise blocks, which the gradient of the weight needs, ignore the groups; to "
                f"cast them from its rowwise blocks would round twice, since their scales are no "
                f"powers of two: pass the high-precision tensor (share_inputs(model) casts it once "
                f"for several weights), or give tokens and weights {in_powers}"
            )
        if x.columnwise_data is None:
            raise ValueError(
                f"the input {list(x.shape)}, which is FP8 already, has no columnwise blocks, which "
                f"the gradient of the weight needs; to cast them from its rowwise blocks would "
                f"round twice, since their scales are no powers of two: cast it by "
                f"blocktensor.quantize(x, recipe=weight.recipe), or give tokens and weights "
                f"{in_powers}"
            )
    if wanted is None or x.source is not None:
        fits = wanted is None and x.source is not None
    else:
        fits = x.columnwise_format.block_shape == wanted.block_shape
    if fits:
        return
    if wanted is None and x.recipe.wgrad_input == recipe.wgrad_input:
        raise ValueError(
            f"the input {list(x.shape)}, which is FP8 already, lacks the tensor from which it was "
            f"cast, which the gradient of the weight reads (wgrad_input='high_precision'): slices "
            f"and concatenations lose it, and tokens that arrive as bytes have none; cut or join "
            f"the high-precision tensors, then call blocktensor.quantize(x, recipe=weight.recipe), "
            f"or convert with wgrad_input='128x128'"
        )
    name = x.columnwise_format.name
    held = f"holds {name} blocks" if x.source is None else "is cast for 'high_precision'"
    raise ValueError(
        f"mixed recipes: the gradient of the weight has wgrad_input={recipe.wgrad_input!r}, and "
        f"the input, which is FP8 already, {held}; cast it with one recipe, e.g. "
        f"blocktensor.quantize(x, recipe=weight.recipe)"
    )
