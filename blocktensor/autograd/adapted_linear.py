"""The differentiable linear and grouped linear of a frozen FP8 weight with one low-rank term.

::

    fprop   u  = s (x · aᵀ)      y  = x · wᵀ + u · bᵀ (+ bias)
    dgrad   v  = s (g · b)       dx = g · w + v · a
    wgrad   da = vᵀ · x          db = gᵀ · u

for rows x and ``w[N, K]``, ``a[r, K]`` and ``b[N, r]``; or for the rows of group e and expert e of
``w[E, N, K]``, ``a[E, r, K]`` and ``b[E, N, r]``. One weight runs as a stack of one expert, which
gets all rows. x wᵀ and g w are FP8 matmuls, which add the product with b or a to their fp32 sums,
before the bias and the only rounding. a and b are first rounded to the dtype of y. u, v, da and db
are each a sum in fp32, rounded once; da and db to the dtype of a and b. The host never reads the
sizes of groups. Rows of no group are zeros in y and dx, whatever they hold. Saved for backward: x,
u, a and b in the dtype of y, and w as in ``linear.py``.

``low_rank.py`` adds the terms that this layer does not take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..ops.formats import Quantized
from ..ops.grouped_gemm.low_rank import is_fused
from ..ops.linear_layer.adapted import adapted_backward, adapted_fprop, backward, fprop
from ..ops.runtime.specialize import PLAIN, sequence
from ..ops.thin.layout import order_of
from ..recipe import Recipe
from ..tensor.adapted import LowRank
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.torch_internals.frames import is_in_graph
from .backward import FP8Function, Gradients, given_out, refuse_gradients, run_backward
from .low_rank import refuse_export_of_term
from .matmuls import caster, matmul_of
from .plan import Plan, autocast_dtype, plan_matmul, recipe_of
from .repeat import Repeated
from .saved_weight import SavedWeight, read_weight
from .shared_cast import this_thread


def adapted_linear(
    x: Tensor,
    w: Tensor,
    term: LowRank,
    offs: Tensor | None,
    bias: Tensor | None,
    recipe: Recipe | None,
) -> Tensor | None:
    """Return the matmul with ``w`` and one term; None if this layer does not take it.

    It takes plain bf16 rows, or rows that autocast converts to bf16; a frozen FP8 weight, or a
    stack and ``offs``; and a rank that grouped GEMMs add.
    """
    # Every attribute of a subclass would otherwise pass through __torch_function__, 2 us each.
    with torch._C.DisableTorchFunctionSubclass():
        if not _takes(x, w, term, offs):
            return None
        if recipe_of(x, w, recipe).backward != "fp8":
            return None
        refuse_export_of_term(x, term)
        rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        y = _of_rows(rows, w, bias, offs, recipe, term.a, term.b, float(term.scaling))
        return y if x.ndim == 2 else given_out(y, (*x.shape[:-1], y.shape[1]))


def _of_rows(*operands: Any) -> Tensor:
    """Return the output for x as a matrix, w, the bias, offs, the recipe, a, b and the scaling."""
    x, w, bias, offs, recipe, *term = operands
    if repeat.table is not None and not is_compiling():
        known = repeat.run(operands)
        if known is not None:
            return known
    plan = plan_matmul(x, w, bias, recipe, offs)
    if plan.is_cached and plan.records_forward:
        known = repeat.remember(operands, plan)
        if known is not None:
            return known
    cast = _shared_cast(x, offs, plan)
    if plan.casts_x:
        x = x.to(plan.out_dtype)
    apply = _AdaptedLinear.apply if plan.tracing else _apply_eagerly
    made: Tensor = apply(x, w, bias, offs, *term, plan, *cast)
    return made


def _takes(x: Tensor, w: Tensor, term: LowRank, offs: Tensor | None) -> bool:
    plain = x, term.a, term.b, *(() if offs is None else (offs,))
    # before torch 2.13 Dynamo leaves grouped_mm to AOTAutograd
    if not is_compiling() and any(type(t) not in PLAIN and not is_in_graph(t) for t in plain):
        return False
    if not isinstance(w, BlockwiseFP8Tensor) or isinstance(x, BlockwiseFP8Tensor):
        return False
    if offs is None:
        fits = x.ndim > 0 and w.ndim == 2
    else:
        fits = x.ndim == 2 and w.ndim == 3 and offs.shape == w.shape[:1]
    if w.requires_grad or not fits or 0 in x.shape or 0 in w.shape:
        return False
    return x.shape[-1] == w.shape[-1] and is_fused(autocast_dtype(x) or x.dtype, term.a.shape[-2])


def _as_stack(w: Quantized) -> Quantized:
    """Return a weight as a stack of one expert; a stack stays as it is."""
    return w if w.data.ndim == 3 else Quantized(w.data[None], w.scale[None], w.format)


def _shared_cast(x: Tensor, offs: Tensor | None, plan: Plan) -> tuple[Tensor, ...]:
    """Return data and scale of x if linear layers share them in this run (``shared_cast.py``)."""
    running = this_thread.running
    return () if running is None else running.forms_of(x, offs, plan, caster(offs))


class _State(NamedTuple):
    """All that backward reads of its forward, except tensors.

    Attributes:
        plan: of the FP8 matmul.
        read: how the weight was read.
        scaling: of the term.
        rank: of the term.
        dtypes: of a and b.
        orders: how their transposes ``[E, K, r]``, and ``[E, N, r]``, lie in memory.
    """

    plan: Plan
    read: SavedWeight
    scaling: float
    rank: int
    dtypes: tuple[torch.dtype, torch.dtype]
    orders: tuple[str, str]


class _AdaptedLinear(FP8Function):
    @staticmethod
    def forward(ctx: Any, *operands: Any) -> Tensor:
        """Run :func:`_forward` of x, w, the bias, offs, a, b, the scaling, the plan and a cast."""
        x, w, bias, offs, a, b, scaling, plan, *cast = operands
        needs = ctx.needs_input_grad[4:6]
        y, saved, ctx.state = _forward(plan, x, w, bias, offs, a, b, scaling, needs, cast)
        ctx.given = True, True, bias is not None, offs is not None, True, True
        ctx.casts = len(cast)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return run_backward(ctx, grads, _gradients_of_context, ctx.given)


def _forward_of_node(
    plan: Plan,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    offs: Tensor | None,
    _: Recipe | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
) -> tuple[Tensor, Sequence[Tensor | None], _State]:
    """Run :func:`_forward` of the operands for the node that ``repeat.py`` makes."""
    cast = _shared_cast(x, offs, plan)
    if plan.casts_x:
        x = x.to(plan.out_dtype)
    needs = a.requires_grad, b.requires_grad
    return _forward(plan, x, w, bias, offs, a, b, scaling, needs, cast)


def _forward(
    plan: Plan,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    offs: Tensor | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
    needs: Sequence[bool],
    cast: Sequence[Tensor],
) -> tuple[Tensor, Sequence[Tensor | None], _State]:
    """Return y, the tensors to save, and what else backward reads.

    Args:
        plan: of the FP8 matmul.
        x: in the dtype of y.
        w, bias, offs, a, b, scaling: see the top of this file.
        needs: whether gradients of a and of b may be wanted.
        cast: data and scale of x, if it is cast already.
    """
    w_row, w_saved, read = read_weight(w, plan)
    x_row = Quantized(cast[0], cast[1], plan.format) if cast else None
    assert not isinstance(w_row, Tensor)
    if offs is None:
        a, b, bias = a[None], b[None], None if bias is None else bias[None]
    a = a.transpose(1, 2)
    compute: Any = _recorded_fprop if plan.records_forward else fprop
    if plan.tracing:
        compute = adapted_fprop
        if x_row is None:  # compilers merge equal casts
            x_row, _ = matmul_of(offs, x).forms(x, plan.format, None)
    how = offs, a, b, scaling, plan.format, plan.out_dtype
    y, u, thin_a, thin_b = compute(x, x_row, _as_stack(w_row), bias, *how)
    orders = order_of(a.stride()), order_of(b.stride())
    state = _State(plan, read, scaling, a.shape[2], (a.dtype, b.dtype), orders)
    kept = x if needs[0] else None, u if needs[1] else None
    return y, (offs, *kept, thin_a, thin_b, *w_saved), state


_recorded_fprop = sequence(0, 1)(fprop)


def _gradients_of_context(
    ctx: Any, saved: list[Any], grads: list[Any], asked: list[bool]
) -> Gradients:
    dx, dbias, da, db = _gradients(ctx.state, saved, grads, asked)
    return dx, None, dbias, None, da, db, None, None, *(None,) * ctx.casts


def _gradients_of_node(
    plan: Plan, state: _State, saved: list[Any], grads: list[Any], asked: list[bool]
) -> Gradients:
    """Return the gradients of the operands for the node that ``repeat.py`` makes."""
    refuse_gradients(grads)
    with torch._C.DisableTorchFunctionSubclass():
        without_recipe = asked[:4] + asked[5:7]
        dx, dbias, da, db = _gradients(state, saved, grads, without_recipe)
    return dx, None, dbias, None, None, da, db


def _gradients(
    state: _State, saved: list[Any], grads: list[Any], asked: Sequence[bool]
) -> Gradients:
    """Return the gradients of x, the bias, a and b.

    ``asked``: which of x, w, the bias, offs, a and b need one.
    """
    plan = state.plan
    grad: Tensor | None = grads.pop()
    needs_dx, _, needs_dbias, _, needs_da, needs_db = asked
    offs, x, u, thin_a, thin_b, *weight = saved
    w_col = state.read.columnwise(weight, needs_dx and grad is not None)
    if grad is None:
        return None, None, None, None
    dbias = matmul_of(offs, grad).dbias(grad, plan) if needs_dbias else None
    x, u = x if needs_da else None, u if needs_db else None
    compute: Any = _recorded_backward if plan.records_backward else backward
    dx, da, db = (adapted_backward if plan.tracing else compute)(
        grad,
        x,
        u,
        None if w_col is None else _as_stack(w_col),
        thin_a if needs_dx else None,
        thin_b,
        offs,
        state.scaling,
        state.rank,
        *state.dtypes,
        *state.orders,
        plan.format,
        plan.x_dtype,
    )
    da = None if da is None else da.transpose(1, 2)
    if offs is None:
        da, db = (None if t is None else t[0] for t in (da, db))
    return dx, dbias, da, db


_recorded_backward = sequence(0, 1, 2)(backward)

repeat = Repeated(
    "FP8AdaptedLinearBackward",
    lambda x, w, bias, offs, recipe, *_: Plan(x, w, bias, recipe, offs),
    _gradients_of_node,
    _forward_of_node,
    with_rows=(0,),
)

# without the preparations for functorch, which would refuse it anyway
_apply_eagerly = super(torch.autograd.Function, _AdaptedLinear).apply
