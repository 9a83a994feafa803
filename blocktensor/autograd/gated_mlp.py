"""The differentiable gated MLP: ``down(activation(gate(x)) * up(x))``, with no cast of its own.

::

    fprop   gate, up = x · wgᵀ, x · wuᵀ    x is cast once
            h        = act(gate) * up      cast as it is computed (ops/producers), never stored
            y        = h · wdᵀ
    dgrad   dh       = g · wd
            dgate, dup                     from one read of dh, gate and up, cast as computed
            dx       = dgate · wg + dup · wu
    wgrad   dwd, dwg, dwu                  of the columnwise forms made on the way

Results have the same bits as three linear layers with eager ops between them. Saved for backward:
the columnwise forms of x and of h (h may be computed again), gate, up, and the weights as in
``linear.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from ..ops.cast.ops import quantize_with_transpose
from ..ops.formats import Quantized
from ..ops.producers.activations import ACTIVATIONS, ActivationName
from ..ops.producers.ops import gated
from ..ops.runtime.specialize import sequence
from ..recipe import Recipe
from ..tensor.adapted import AdaptedWeight
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.weight import BlockwiseFP8Weight
from .any_linear import grouped_linear, linear
from .backward import FP8Function, Gradients, given_out, refuse_gradients, run_backward
from .gated_forms import (
    DOWN,
    GATE,
    UP,
    GatedPlan,
    features_of_h,
    forms_in_backward,
    halves,
    plan_gated,
)
from .linear import has_no_experts
from .matmuls import derived_columnwise, matmul_of
from .pipelining import is_input_half, watch_halves
from .repeat import Repeated
from .saved_kinds import mark_activations
from .saved_weight import SavedWeight, hold_cast


def gated_mlp(
    x: Tensor,
    weights: tuple[Tensor, Tensor | None, Tensor],
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    offs: Tensor | None,
    activation: ActivationName,
    recompute: bool,
    recipe: Recipe | None,
) -> Tensor:
    """Run :func:`blocktensor.functional.gated_mlp`, for plain and for FP8 operands.

    With ``offs``, :func:`blocktensor.functional.gated_experts`.
    """
    if any(type(w) is AdaptedWeight for w in weights):
        features_of_h(*weights[:2])
        linears = linears_by(linear, grouped_linear, offs, recipe)
        return one_by_one(linears, x, weights, biases, activation)
    with torch._C.DisableTorchFunctionSubclass():
        if type(x) is BlockwiseFP8Weight:
            x = x.high_precision()
        # Each linear layer has its own edge to x, in the order in which their backwards would run.
        # So all gradients of x are summed in the same order as without this function.
        again = None if weights[1] is None else x
        operands = x, again, *weights, *biases, offs, activation, recompute, recipe
        if repeat.table is not None and not is_compiling():
            known = repeat.run(operands)
            if known is not None:
                return known
        plan: GatedPlan | None = None
        if offs is not None and has_no_experts(x, weights[0], offs):
            features_of_h(*weights[:2])
        else:
            plan = plan_gated(offs, x, weights, biases, activation, recompute, recipe)
        if plan is None or plan.one_by_one:
            linears = linears_by(linear, grouped_linear, offs, recipe)
            return one_by_one(linears, x, weights, biases, activation)
        if all(of is None or (of.is_cached and of.records_forward) for of in plan.linears):
            known = repeat.remember(operands, plan)
            if known is not None:
                return known
        if again is not None and is_dynamo_compiling():
            again = x.view(x.shape)  # autograd would take none twice
        apply = _GatedMLP.apply if plan.tracing else _apply_eagerly
        y: Tensor = apply(x, again, *weights, *biases, offs, plan)
        return given_out(y, (*x.shape[:-1], y.shape[1]))


def linears_by(
    linear: Any, grouped_linear: Any, offs: Tensor | None, recipe: Recipe | None
) -> Callable[..., Sequence[Tensor]]:
    """Return the ``linears`` argument of :func:`one_by_one` that runs these functions."""

    def linears(x: Tensor, ws: Sequence[Tensor], bs: Sequence[Tensor | None]) -> Sequence[Tensor]:
        if offs is not None:
            return [grouped_linear(x, w, offs, recipe=recipe) for w in ws]
        return [linear(x, w, b, recipe=recipe) for w, b in zip(ws, bs, strict=True)]

    return linears


def one_by_one(
    linears: Callable[..., Sequence[Tensor]],
    x: Tensor,
    weights: tuple[Tensor, Tensor | None, Tensor],
    biases: Sequence[Tensor | None],
    activation: ActivationName,
) -> Tensor:
    """Compute a gated MLP by ``linears(x, weights, biases)`` and torch's ops between them."""
    w_gate, w_up, w_down = weights
    if w_up is None:
        gate, up = linears(x, [w_gate], biases[:1])[0].chunk(2, -1)
    else:
        gate, up = linears(x, [w_gate, w_up], biases[:2])
    (y,) = linears(ACTIVATIONS[activation].value(gate) * up, [w_down], biases[2:])
    return y


class _State:
    """Hold everything except tensors that a backward reads of its forward.

    Attributes:
        plan: the plan of the gated MLP.
        given: True for each of the first operands that is a tensor, up to the bias of down.
        reads: how the weights of gate, up and down were read.
        counts: how many tensors were saved of the weights of gate and up.
        x_shape: the shape of the input.
        held: the gradient of h that the input half of a split backward has computed, with the
            gradient of y and its version.
    """

    __slots__ = ("counts", "given", "held", "plan", "reads", "x_shape")

    def __init__(
        self,
        plan: GatedPlan,
        given: list[bool],
        reads: tuple[Any, ...],
        counts: tuple[int, int] = (0, 0),
        x_shape: Sequence[int] = (),
    ) -> None:
        self.plan, self.given, self.reads, self.counts = plan, given, reads, counts
        self.x_shape = x_shape
        self.held: Any = None


class _GatedMLP(FP8Function):
    @staticmethod
    def forward(ctx: Any, *operands: Any) -> Tensor:
        """Run :func:`_forward` of x, x again, the weights, the biases, offs and the plan."""
        y, saved, ctx.state = _forward(operands[-1], *operands[:-1])
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        made = run_backward(ctx, grads, _gradients_of_context, ctx.state.given)
        return *made, None, None


def _forward(
    plan: GatedPlan,
    x: Tensor,
    x_again: Tensor | None,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    bias_gate: Tensor | None,
    bias_up: Tensor | None,
    bias_down: Tensor | None,
    offs: Tensor | None,
    *choices: Any,
) -> tuple[Tensor, Sequence[Tensor | None], _State]:
    """Return y, the tensors to save, and the other state that backward reads."""
    if not plan.down.tracing:
        watch_halves()
    weights: tuple[Any, ...] = w_gate, w_up, w_down
    biases = bias_gate, bias_up, bias_down
    given = [each is not None for each in (x, x_again, *weights, *biases)]
    if plan.gate.casts_x:
        x = x.to(plan.gate.out_dtype)
    reads: list[SavedWeight | None] = [None, None, None]
    saved: list[Sequence[Tensor]] = [(), (), ()]
    if plan.records_forward:
        masters = [None if w is None else w.cache.master for w in weights]
        y, x_col, h_col, gate, up, w_cols = _cast_and_fprop(x, *masters, *biases, offs, plan)
        for i, w in enumerate(weights):
            if w is not None:
                saved[i], reads[i] = hold_cast(w, plan.linears[i], w_cols[i])
    else:
        matmul = matmul_of(offs, x)

        def read(i: int) -> Quantized | Tensor:
            row, saved[i], reads[i] = matmul.weight(weights[i], plan.linears[i])
            return row

        y, x_col, h_col, gate, up = _fprop(x, read, biases, offs, plan)
    if not plan.down.tracing:
        mark_activations(gate, up)
    of_x, of_h = ((None, None) if form is None else form[:2] for form in (x_col, h_col))
    state = _State(plan, given, tuple(reads), (len(saved[0]), len(saved[1])), x.shape)
    return y, (offs, *of_x, *of_h, gate, up, *saved[0], *saved[1], *saved[2]), state


def _fprop(
    x: Tensor,
    read: Callable[[int], Quantized | Tensor],
    biases: Sequence[Tensor | None],
    offs: Tensor | None,
    plan: GatedPlan,
) -> tuple[Tensor, Quantized | None, Quantized | None, Tensor | None, Tensor | None]:
    """Return y, the columnwise forms of x and h, gate and up, as far as backward reads them.

    Of x in FP8, return the rowwise form, if the columnwise one is derived from it.

    ``read(i)`` returns the rowwise form of a weight, or what else fprop reads of it.
    """
    matmul = matmul_of(offs, x)
    x_row, x_saved = matmul.forms(
        x, plan.gate.format, None if plan.derives_x else plan.x_columnwise
    )
    if plan.derives_x and isinstance(x, BlockwiseFP8Tensor):
        x_saved = x.rowwise()
    gate: Any = matmul.fprop(x_row, read(GATE), biases[GATE], plan.gate)
    up: Any = None
    if plan.up is not None:
        up = matmul.fprop(x_row, read(UP), biases[UP], plan.up)
    del x_row
    h_columnwise = plan.down.x_columnwise if plan.saves_h else None
    h_row, h_col = gated(*halves(gate, up), plan.activation, plan.down.format, h_columnwise, offs)
    assert h_row is not None
    if not plan.needs_dh:
        gate = up = None
    return matmul.fprop(h_row, read(DOWN), biases[DOWN], plan.down), x_saved, h_col, gate, up


@sequence(0)
def _cast_and_fprop(x: Tensor, *others: Any) -> tuple[Any, ...]:
    """Cast the masters and run :func:`_fprop`; return also the columnwise forms of the weights.

    ``others``: the masters of gate, up and down, their biases, offs and the plan.
    """
    plan: GatedPlan = others[-1]
    w_cols: list[Quantized | None] = [None, None, None]

    def read(i: int) -> Quantized:
        row, w_cols[i] = quantize_with_transpose(others[i], plan.linears[i].weight_format)
        return row

    return *_fprop(x, read, others[3:6], *others[6:]), tuple(w_cols)


@sequence(0, 3, 4)
def _of_forms(grad: Tensor, *others: Any) -> Gradients:
    """Return the gradients of x and of all weights, from saved forms.

    ``others``: the columnwise forms of x and h, gate, up, the columnwise forms of the weights,
    offs, which gradients are asked for, and the plan.
    """
    x, h, gate, up, *w_cols, offs, asked, plan = others
    reads = [
        SimpleNamespace(plan=of, columnwise=lambda saved, needed, form=form: form)
        for of, form in zip(plan.linears, w_cols, strict=True)
    ]
    saved = [offs, *x[:2], *((None, None) if h is None else h[:2]), gate, up]
    return _op_by_op(_State(plan, [], tuple(reads)), saved, [grad], asked)


def _gradients_of_context(
    ctx: Any, saved: list[Any], grads: list[Any], asked: list[bool]
) -> Gradients:
    return _gradients(ctx.state, saved, grads, asked)


def _gradients_of_node(
    plan: GatedPlan, state: _State, saved: list[Any], grads: list[Any], asked: list[bool]
) -> Gradients:
    """Return the gradients for the node that ``repeat.py`` makes."""
    refuse_gradients(grads)
    asked += [False] * (len(state.given) - len(asked))
    with torch._C.DisableTorchFunctionSubclass():
        return _gradients(state, saved, grads, asked)


def _gradients(state: _State, saved: list[Any], grads: list[Any], asked: list[bool]) -> Gradients:
    """Return the gradients of the operands of :func:`_forward`, up to the bias of down."""
    plan = state.plan
    if plan.derives_x and any(asked[2:4]) and grads[0] is not None:
        formats = plan.gate.format, plan.x_columnwise
        saved[1:3] = derived_columnwise(saved[0], saved[1:3], grads[0], *formats)
    compute = _repeated if _may_repeat(state, saved[7:], grads[0], asked) else _op_by_op
    made = compute(state, saved, grads, asked)
    dxs = [None if dx is None else dx.view(state.x_shape) for dx in made[:2]]
    return *dxs, *made[2:]


def _repeated(state: _State, saved: list[Any], grads: list[Any], asked: list[bool]) -> Gradients:
    """Compute the gradients by a recorded sequence; gradients of x are matrices."""
    plan = state.plan
    formats: Any = (plan.x_columnwise, plan.down.x_columnwise)
    offs, *forms, gate, up = saved[:7]
    x, h = (
        None if data is None else Quantized(data, scale, format)
        for data, scale, format in zip(forms[::2], forms[1::2], formats, strict=True)
    )
    pairs = zip(state.reads, _split(saved[7:], state.counts), strict=True)
    w_cols = [read and read.columnwise(w, True) for read, w in pairs]
    made: Gradients = _of_forms(grads[0], x, h, gate, up, *w_cols, offs, tuple(asked), plan)
    return made


def _may_repeat(state: _State, weights: list[Any], grad: Tensor | None, asked: list[bool]) -> bool:
    """Return True if the backward may be recorded and wants all gradients except of biases."""
    return (
        state.plan.records_backward
        and grad is not None
        and asked == [each and i < 5 for i, each in enumerate(state.given)]
        and all(isinstance(w, BlockwiseFP8Weight) for w in weights)
        and not (is_input_half() or state.held is not None)
    )


def _op_by_op(
    state: _State, saved: list[Any], grads: list[Any], asked: Sequence[bool]
) -> Gradients:
    """Return the gradients that are asked for; free each tensor after its last read.

    Gradients of x are matrices.
    """
    plan = state.plan
    grad: Tensor | None = grads.pop()
    of_down: Any = state.reads[2]
    matmul = matmul_of(saved.pop(0), grad)
    (x_data, x_scale), of_h = saved[:2], list(saved[2:6])  # Dynamo of 2.11 makes *of_h a tuple
    weights = saved[6:]
    saved.clear()
    w_gate, w_up, w_down = _split(weights, state.counts)
    needs_dx, *needed = asked
    needs_dw, needs_dbias = needed[1:4], needed[4:]
    dws: list[Tensor | None] = [None, None, None]
    dbiases: list[Tensor | None] = [None, None, None]
    if needs_dbias[2] and grad is not None:
        dbiases[2] = matmul.dbias(grad, plan.down)

    needs_dh = needs_dx or any(needs_dw[:2]) or any(needs_dbias[:2])
    row, col = plan.down.grad_formats
    row, col = row if needs_dh else None, col if needs_dw[2] else None
    g = None
    if grad is not None and (row or col):
        g = matmul.forms(grad, row, col)
    dh = _held_dh(state, grad) if needs_dh else None
    holds_dh = not plan.down.tracing and is_input_half() and plan.needs_first_dw
    kept_grad = grad if holds_dh else None
    del grad
    has_dh = needs_dh and g is not None
    w_col = of_down.columnwise(w_down, has_dh and dh is None)
    if g is None:  # no gradient came back to this output, or only the bias of down needs one
        _read_no_firsts(state.reads, (w_gate, w_up))
        return None, None, *dws, *dbiases

    g_row, g_col = g
    del g
    if has_dh:
        if dh is None:
            assert w_col is not None
            dh = matmul.dgrad(g_row, w_col, plan.down)
            if kept_grad is not None:
                state.held = kept_grad, kept_grad._version, dh
        del w_col, g_row
    else:
        _read_no_firsts(state.reads, (w_gate, w_up))
    sources = [*of_h, dh]
    of_h.clear()
    del dh, kept_grad
    dxs: list[Tensor | None] = [None, None]
    row, col = plan.dh_formats
    formats = row if needs_dx else None, col if any(needs_dw[:2]) else None
    x_cols = _columnwise_inputs(plan, x_data, x_scale)
    del x_data, x_scale
    made = forms_in_backward(matmul, plan, sources, needs_dw[2], formats, needs_dbias, dbiases)
    for i, (d_row, d_col) in made:
        if i == DOWN:
            assert g_col is not None
            assert d_col is not None
            dws[2] = matmul.wgrad(g_col, d_col, plan.down)
            del d_row, d_col, g_col
            continue
        read, w = state.reads[i], (w_gate, w_up)[i]
        if needs_dw[i]:  # before dgrad, whose result is the largest tensor here
            assert d_col is not None
            dws[i] = matmul.wgrad(d_col, x_cols.pop(), read.plan)
        del d_col
        w_col = read.columnwise(w, needs_dx)
        if needs_dx:
            dxs[i], _ = matmul.finish(matmul.dgrad(d_row, w_col, read.plan), None, read.plan)
        del w_col, d_row
    if plan.up is None:
        dxs.reverse()  # the one edge to x is the first
    return dxs[1], dxs[0], *dws, *dbiases


def _columnwise_inputs(plan: GatedPlan, data: Any, scale: Any) -> list[Quantized]:
    """Yield the columnwise form of x once for each wgrad, and free it after the last."""
    if data is None:
        return []
    assert plan.x_columnwise is not None
    return [Quantized(data, scale, plan.x_columnwise)] * (1 if plan.up is None else 2)


def _held_dh(state: _State, grad: Tensor | None) -> Tensor | None:
    """Return, once, the gradient of h that the input half of a split backward has computed.

    Plain autograd keeps the gradients of gate and up, which are larger, between the halves.
    """
    if state.plan.down.tracing:
        return None
    held, state.held = state.held, None
    if held is None or held[1] != held[0]._version or held[0] is not grad:
        return None
    dh: Tensor = held[2]
    return dh


def _read_no_firsts(reads: Sequence[Any], weights: Sequence[Sequence[Tensor]]) -> None:
    """Release the forms of gate and up, which this backward does not read."""
    for read, w in zip(reads[:2], weights, strict=True):
        if read is not None:
            read.columnwise(w, False)


def _split(saved: Sequence[Tensor], counts: tuple[int, int]) -> list[Sequence[Tensor]]:
    a, b = counts
    return [saved[:a], saved[a : a + b], saved[a + b :]]


# _GatedMLP.apply without its preparations for functorch, which would refuse it anyway
_apply_eagerly = super(torch.autograd.Function, _GatedMLP).apply


def _plan_anew(x: Tensor, x_again: Tensor | None, *operands: Any) -> GatedPlan:
    offs, activation, recompute, recipe = operands[6:]
    return plan_gated(offs, x, operands[:3], operands[3:6], activation, recompute, recipe)


repeat = Repeated("FP8GatedMLPBackward", _plan_anew, _gradients_of_node, _forward, with_rows=(0, 1))
