"""Define the forms, fprop, dgrad and wgrad of each kind of matmul.

::

    Dense     fprop  y  = x · wᵀ            x.rowwise     w.rowwise       1x128 · 128x128
              dgrad  dx = g · w             g.rowwise     w.columnwise    1x128 · 128x128
              wgrad  dw = gᵀ · x            g.columnwise  x.columnwise    1x128 · 1x128, or
                                                                          1x128 · 128x128
    Grouped   the same for rows of group e of x and g, and expert w[e]

``Recipe(wgrad_input=...)`` chooses the blocks of x columnwise; with ``"high_precision"`` wgrad
reads x and g themselves, with ``"dequantized"`` the values of x.rowwise and g itself.
``Recipe(backward=...)`` chooses so for dgrad as well: it reads w, or the values of w.columnwise,
and g itself. ``tensor_parallel/parallel_matmuls.py`` has the matmuls whose weight
several ranks share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from ..ops.cast.ops import (
    columnwise_from_rowwise,
    dequantize,
    quantize_forms,
    quantize_grouped,
)
from ..ops.cast.producer import Forms
from ..ops.formats import BlockFormat, Quantized
from ..ops.gemm.ops import gemm
from ..ops.grouped_gemm.ops import grouped_gemm, grouped_gemm_wgrad
from ..ops.linear_layer.ops import linear_backward, linear_fprop
from ..ops.runtime.specialize import PLAIN, must_dispatch, sequence
from ..ops.scale_layouts import VECTOR_BYTES, in_group_steps, lines_of, scale_in_lines
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from .plan import Plan, derives_columnwise, may_record
from .saved_weight import SavedWeight, WeightRead, read_weight

Saved: TypeAlias = tuple[Tensor | None, Tensor | None]
"""The saved part of x for wgrad: data and scale of a form; or x and None; or None and None.

The form is columnwise; or rowwise, if x is FP8 and the columnwise form is derived in backward, or
if wgrad reads dequantized inputs."""


class Dense:
    """The matmul of ``x[..., K]`` and one weight ``w[N, K]``; the base of other kinds.

    A linear layer calls these methods in this order.
    """

    offs: Any = None

    def input(self, x: Tensor, plan: Plan) -> tuple[Any, Saved]:
        """Return the rowwise form of x for :meth:`fprop`, and what to save of x."""
        if plan.derives_x and isinstance(x, BlockwiseFP8Tensor):
            x_row, _ = self.forms(x, plan.format, None)
            return x_row, x.rowwise()[:2]
        x_row, x_col = self.forms(x, plan.format, plan.x_columnwise)
        return x_row, saved_of(x, x_row, x_col, plan)

    def derived(self, x: Quantized, columnwise: BlockFormat) -> Quantized:
        """Return the columnwise form of tokens in FP8, derived from their rowwise form."""
        if may_record(x.data):
            return _columnwise_of_rows(*x, columnwise)
        return columnwise_from_rowwise(x, columnwise)

    weight: Callable[[Tensor, Plan], WeightRead] = staticmethod(read_weight)
    """Read the weight; see :func:`~.saved_weight.read_weight`."""

    def fprop(self, x: Any, w: Quantized | Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
        """Return ``y[M, N] = x wᵀ (+ bias)`` of rowwise forms; a weight that is not FP8 is cast.

        See :data:`~.saved_weight.WeightRead`.
        """
        if plan.records_rows and isinstance(w, Quantized):
            return _gemm_of_rows(*x[:2], x.format, w, bias, plan.out_dtype, plan.batch_invariant)
        return multiply(x, w, bias, plan.out_dtype, plan)

    def output_shape(self, shape: Sequence[int]) -> Sequence[int]:
        """Return the shape of y without its last dimension, for an x of ``shape``."""
        return shape

    def dbias(self, grad: Tensor, plan: Plan) -> Any:
        """Return the gradient of the bias: the sum of all rows, computed in fp32."""
        return sum_rows(grad, plan.bias_dtype)

    def wgrad_input(self, saved: Saved, plan: Plan) -> Any:
        """Return what :meth:`wgrad` reads of x, from what forward saved."""
        data, scale = saved
        assert data is not None
        if scale is None:
            return data
        if plan.saves_rows:
            return dequantize(Quantized(data, scale, plan.format), plan.out_dtype)
        assert plan.x_columnwise is not None
        return Quantized(data, scale, plan.x_columnwise)

    def grad_forms(
        self, grad: Tensor, plan: Plan, needs_dx: bool, needs_dw: bool
    ) -> tuple[Any, Any]:
        """Return what dgrad and wgrad read of the gradient of y."""
        row, col = plan.grad_formats
        g_row, g_col = self.forms(grad, row if needs_dx else None, col if needs_dw else None)
        return grad if plan.plain_dgrad else g_row, grad if plan.plain_wgrad else g_col

    def forms(
        self, x: Tensor, rowwise: BlockFormat | None, columnwise: BlockFormat | None
    ) -> Forms:
        """Return the forms of an activation or gradient, cast now unless it is FP8 already."""
        if not isinstance(x, BlockwiseFP8Tensor):
            return quantize_forms(x, rowwise, columnwise)
        wanted = rowwise, columnwise
        for side, own, format in zip(("row", "column"), x.formats, wanted, strict=True):
            if side == "column" and derives_columnwise(x):
                continue
            if format is not None and own.block_shape != format.block_shape:
                raise ValueError(
                    f"a {side}wise form in {own.name} blocks where an FP8 linear layer reads "
                    f"{format.name}: pass the tensor in high precision, or cast gradients with "
                    f"blocktensor.quantize(grad, Recipe.deepseek())"
                )
        row = x.rowwise() if rowwise else None
        if columnwise is None:
            return row, None
        if derives_columnwise(x) and columnwise.power_of_two:
            return row, self.derived(x.rowwise(), columnwise)
        return row, x.operand.need_columnwise(columnwise)

    def traced_backward(
        self,
        grad: Tensor,
        x: Quantized | None,
        read: SavedWeight,
        saved: Sequence[Tensor],
        plan: Plan,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return dx and dw by one op, while a compiler traces.

        Args:
            grad: of y.
            x: the columnwise form; None if dw is not wanted.
            read: how forward has read the weight.
            saved: the tensors that forward saved of the weight; none if dx is not wanted.
            plan: of the matmul.
        """
        w = read.traced_master(saved) if saved else None
        w_col = read.columnwise(saved, True) if saved and w is None else None
        return linear_backward(
            grad,
            x,
            w,
            w_col,
            self.offs,
            plan.grad_format,
            plan.weight_format,
            plan.x_dtype,
            plan.w_dtype,
            plan.w_is_transposed,
        )

    def dgrad(self, g: Any, w: Quantized | Tensor, plan: Plan) -> Any:
        """Return ``dx[M, K] = g w``, of rowwise g and columnwise w, or in high precision."""
        if isinstance(w, Tensor):
            return dgrad_in_high_precision(g, w, plan.x_dtype)
        return gemm(g, w, None, plan.x_dtype)

    def wgrad(self, g: Any, x: Any, plan: Plan) -> Tensor:
        """Return ``dw[N, K] = gᵀ x``, of columnwise forms or in high precision."""
        if isinstance(g, Quantized):
            return gemm(g, x, None, plan.w_dtype)
        return wgrad_in_high_precision(g, x, plan.w_dtype)

    def finish(self, dx: Any, dbias: Any, plan: Plan) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x ``[M, K]`` and of the bias, from results of dgrad and dbias."""
        return dx, dbias


def saved_of(x: Tensor, x_row: Quantized | None, x_col: Quantized | None, plan: Plan) -> Saved:
    """Return what to save of x, whose forms are ``x_row`` and ``x_col``."""
    if plan.saves_rows:
        assert x_row is not None
        return x_row[:2]
    if plan.saves_x:
        return x.unchanged_source() if isinstance(x, BlockwiseFP8Tensor) else x, None
    return (None, None) if x_col is None else x_col[:2]


class Grouped(Dense):
    """The matmuls of the rows of group e of ``x[T, K]`` and the expert ``w[e]`` of ``[E, N, K]``.

    Groups are consecutive rows that end at ``offs`` ``[E]``, on the device; nothing here reads it
    on the host. Columnwise blocks of x and g begin anew in every group. Rows of no group, from
    ``offs[-1]`` on, are zeros in y and dx; their values in x and g are not used.
    """

    def __init__(self, offs: Tensor, tokens: int) -> None:
        """Describe groups that end at ``offs``, int32 ``[E]``, of ``tokens`` rows in all."""
        self.offs, self.tokens = offs, tokens

    def forms(
        self, x: Tensor, rowwise: BlockFormat | None, columnwise: BlockFormat | None
    ) -> Forms:
        """Return the forms of an activation or gradient ``[T, ...]``."""
        if isinstance(x, BlockwiseFP8Tensor):
            row = _in_steps(x.rowwise())
            if columnwise is None:
                return row if rowwise else None, None
            if not (row.format.power_of_two and columnwise.power_of_two):
                raise NotImplementedError(
                    "a gradient of a grouped FP8 linear layer that is FP8 already: its columnwise "
                    "blocks, which the gradient of the weight needs, ignore the groups; pass it in "
                    "high precision (.dequantize())"
                )
            return row if rowwise else None, self.derived(row, columnwise)
        if rowwise is None and columnwise is None:
            return None, None
        return quantize_grouped(x, self.offs, rowwise, columnwise)

    def derived(self, x: Quantized, columnwise: BlockFormat) -> Quantized:
        """Return the columnwise form of tokens in FP8, whose blocks begin anew in every group."""
        return columnwise_from_rowwise(_in_steps(x), columnwise, self.offs, self.tokens)

    def fprop(self, x: Any, w: Quantized | Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
        """Return ``y[T, N]``."""
        if isinstance(w, Tensor):
            how = plan.weight_format, plan.out_dtype, self.tokens, plan.batch_invariant
            return linear_fprop(x, w, bias, self.offs, *how)
        return grouped_gemm(x, w, self.offs, bias, plan.out_dtype, self.tokens)

    def wgrad_input(self, saved: Saved, plan: Plan) -> Any:
        """Return what :meth:`wgrad` reads of x; casts in groups have more rows."""
        x = super().wgrad_input(saved, plan)
        return x[: self.tokens] if plan.saves_rows else x

    def dgrad(self, g: Any, w: Quantized | Tensor, plan: Plan) -> Any:
        """Return ``dx[T, K]``."""
        if isinstance(w, Tensor):
            return grouped_dgrad_in_high_precision(g, w, self.offs, plan.x_dtype)
        return grouped_gemm(g, w, self.offs, None, plan.x_dtype, self.tokens)

    def wgrad(self, g: Any, x: Any, plan: Plan) -> Tensor:
        """Return ``dw[E, N, K]``."""
        if not isinstance(g, Quantized):
            return grouped_wgrad_in_high_precision(g, x, self.offs, plan.w_dtype)
        if plan.w_is_transposed:
            return grouped_gemm_wgrad(x, g, self.offs, self.tokens, plan.w_dtype).transpose(1, 2)
        return grouped_gemm_wgrad(g, x, self.offs, self.tokens, plan.w_dtype)

    def dbias(self, grad: Tensor, plan: Plan) -> Any:
        """Return the sums of the rows of each group, ``[E, N]``."""
        return sum_groups(grad, self.offs).to(plan.bias_dtype)


DENSE = Dense()


# Tokens that arrive in FP8, whose number differs between calls


def _in_steps(x: Quantized) -> Quantized:
    """Return rows in groups in one of few sizes, as casts have, unless a compiler traces."""
    return x if must_dispatch(x.data) else in_group_steps(x)


@sequence(0, 1)
def _gemm_of_rows(
    data: Tensor, scale: Tensor, format: BlockFormat, w: Quantized, *others: Any
) -> Tensor:
    return gemm(Quantized(data, scale, format), w, *others)


@sequence(0, 1)
def _columnwise_of_rows(
    data: Tensor, scale: Tensor, format: BlockFormat, columnwise: BlockFormat
) -> Quantized:
    return columnwise_from_rowwise(Quantized(data, scale, format), columnwise)


def multiply(
    x: Quantized, w: Quantized | Tensor, bias: Tensor | None, out_dtype: torch.dtype, plan: Plan
) -> Tensor:
    """Return ``y[M, N] = x wᵀ (+ bias)`` in ``out_dtype``; a plain ``w`` is cast."""
    if isinstance(w, Tensor):
        how = plan.weight_format, out_dtype, x.data.shape[0], plan.batch_invariant
        return linear_fprop(x, w, bias, None, *how)
    return gemm(x, w, bias, out_dtype, plan.batch_invariant)


def matmul_of(offs: Tensor | None, rows: Tensor | None) -> Dense:
    """Return the grouped matmul of ``rows`` rows if there are ``offs``, else the dense one."""
    return DENSE if offs is None or rows is None else Grouped(offs, rows.shape[0])


def caster(offs: Tensor | None) -> Callable[[Plan, Tensor], tuple[Tensor, ...]]:
    """Return the function that casts an input which linear layers share (``shared_cast.py``)."""

    def cast(plan: Plan, x: Tensor) -> tuple[Tensor, ...]:
        """Return data and scale of both forms of x; the columnwise one only if wgrad reads it."""
        formats = plan.format, plan.x_columnwise
        if offs is None and plan.records_forward:
            data, lines, *others = _cast_of_rows(x, *formats)
            return data, scale_in_lines(lines, data.shape[0]), *others
        row, col = matmul_of(offs, x).forms(x, *formats)
        assert row is not None
        return *row[:2], *(() if col is None else col[:2])

    return cast


@sequence(0)
def _cast_of_rows(
    x: Tensor, rowwise: BlockFormat, columnwise: BlockFormat | None
) -> tuple[Tensor, ...]:
    """Return data and scale of both forms of x; for the rowwise one, the lines of its scale.

    The scale itself is a view whose size depends on the rows, which no recording can return.
    """
    row, col = quantize_forms(x, rowwise, columnwise)
    assert row is not None
    return row.data, lines_of(row.scale), *(() if col is None else col[:2])


def derived_columnwise(
    offs: Tensor | None,
    row: Sequence[Tensor],
    grad: Tensor,
    format: BlockFormat,
    columnwise: BlockFormat | None,
) -> tuple[Tensor, Tensor]:
    """Return data and scale of x columnwise, of rowwise ones that forward has saved.

    Args:
        offs: the ends of groups, or None.
        row: data and scale of x in ``format``.
        grad: of y, which has as many rows.
        format, columnwise: the two formats of x.
    """
    assert columnwise is not None  # wgrad reads it
    return matmul_of(offs, grad).derived(Quantized(row[0], row[1], format), columnwise)[:2]


def sum_rows(grad: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the sum of all rows of ``grad[..., N]``, computed in fp32."""
    return _rows(grad).sum(0, dtype=torch.float32).to(dtype)


def _rows(x: Tensor) -> Tensor:
    """View ``x[..., K]`` as a matrix, also with K = 0, for which ``reshape`` cannot infer rows."""
    return x[None] if x.ndim == 1 else x.flatten(0, -2)


def sum_groups(x: Tensor, offs: Tensor) -> Tensor:
    """Return the fp32 sums ``[E, N]`` of the rows of each group of ``x[T, N]``.

    Deterministic and without a synchronisation; rows of no group are not read.
    """
    begins_and_end = F.pad(ends_within(offs, x), (1, 0))
    return torch.segment_reduce(x.float(), "sum", offsets=begins_and_end, unsafe=True, initial=0)


def ends_within(offs: Tensor, x: Tensor) -> Tensor:
    """Return ends of groups of the rows of ``x``: torch's ops would read memory beyond x."""
    return offs.clamp(0, x.shape[0]).cummax(0).values


def dgrad_in_high_precision(grad: Tensor, w: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return ``dx[M, K] = grad w`` of ``grad[..., N]`` and ``w[N, K]``, in the dtype of grad."""
    grad = _plain(grad)
    with without_autocast(w):
        return torch.mm(_rows(grad), w.to(grad.dtype)).to(out_dtype)


def grouped_dgrad_in_high_precision(
    grad: Tensor, w: Tensor, offs: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Return ``dx[T, K]``, :func:`dgrad_in_high_precision` of the rows of each group.

    Rows of no group are zeros. bf16 does not synchronise with the host.
    """
    grad, k = _plain(grad), w.shape[2]
    ends = ends_within(offs, grad)
    g = in_vectors(grad)
    # whole vectors along both dimensions, whichever is contiguous
    missing = g.shape[1] - w.shape[1], -k % (VECTOR_BYTES // g.itemsize)
    w = w.to(g.dtype)
    if any(missing):
        w = F.pad(w, (0, missing[1], 0, missing[0]))
    with without_autocast(w):
        dx = F.grouped_mm(g, w, offs=ends)[:, :k]
    beyond = torch.arange(len(dx), device=dx.device) >= ends[-1]
    return dx.masked_fill(beyond[:, None], 0).to(out_dtype)


def wgrad_in_high_precision(grad: Tensor, x: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return ``dw[N, K] = gradᵀ x`` of ``grad[..., N]`` and ``x[..., K]``, in the dtype of grad.

    Sums are in fp32, and rounded once to ``out_dtype``.
    """
    grad = _plain(grad)
    g, x = _rows(grad).t(), _rows(x).to(grad.dtype)
    with without_autocast(x):
        if out_dtype == x.dtype:
            return torch.mm(g, x)
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(g, x, out_dtype=torch.float32).to(out_dtype)
        return torch.mm(g.float(), x.float()).to(out_dtype)


def grouped_wgrad_in_high_precision(
    grad: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Return ``dw[E, N, K]``, :func:`wgrad_in_high_precision` of the rows of each group.

    Each is rounded to the dtype of ``grad`` first. bf16 does not synchronise with the host.
    """
    grad = _plain(grad)
    n, k = grad.shape[1], x.shape[1]
    g, x = in_vectors(grad), in_vectors(x.to(grad.dtype))
    with without_autocast(x):
        dw = F.grouped_mm(g.t(), x, offs=ends_within(offs, x))
    return dw[:, :n, :k].to(out_dtype)


def _plain(grad: Tensor) -> Tensor:
    return grad.dequantize() if isinstance(grad, BlockwiseFP8Tensor) else grad


def in_vectors(x: Tensor) -> Tensor:
    """Return ``x[T, C]`` in rows of whole 16-byte vectors, as torch's grouped matmuls read it."""
    missing = -x.shape[1] % (VECTOR_BYTES // x.itemsize)
    if missing:
        return F.pad(x, (0, missing))
    x = x.contiguous()
    # compiled code aligns its inputs; in torch 2.11 a traced backward has only the tensor's type
    if is_compiling() or type(x) not in PLAIN or x.data_ptr() % VECTOR_BYTES == 0:
        return x
    return x.clone()


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Switch off the caller's autocast, which would change the dtype of matmuls in a backward."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)
