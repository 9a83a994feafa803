"""The differentiable low-rank term of an adapter: ``y + s (x aᵀ) bᵀ``, in the dtype of y.

::

    fprop   u  = s (x · aᵀ)      y + u · bᵀ
    dgrad   v  = s (g · b)       dx = v · a
    wgrad   da = vᵀ · x          db = gᵀ · u

of rows ``x[M, K]`` and matrices ``a[r, K]`` and ``b[N, r]``, or of the rows of each group and
``a[E, r, K]`` and ``b[E, N, r]``. Each matmul sums in fp32 and rounds once to the dtype of y; so do
the product with s and the sum with y. The host never reads the sizes of groups in bf16. Rows of no
group add zeros, whatever they hold. Saved for backward: x, u, and the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from ..ops.scale_layouts import VECTOR_BYTES
from ..tensor.adapted import LowRank
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from .backward import FP8Function, Gradients, given_out, run_backward
from .matmuls import ends_within, in_vectors, without_autocast
from .plan import refuse_export


def plus_low_rank(y: Tensor, x: Tensor, term: LowRank, offs: Tensor | None) -> Tensor:
    """Return ``y + s (x aᵀ) bᵀ``.

    Args:
        y: ``[..., N]``, the output of the linear layer, in high precision.
        x: ``[..., K]``, its input; FP8 is dequantized.
        term: b ``[N, r]`` and a ``[r, K]``; with ``offs`` ``[E, N, r]`` and ``[E, r, K]``.
        offs: int32 ``[E]``, the cumulative ends of the groups of rows, or None.

    Raises:
        TypeError: a compiler traces groups in another dtype than bf16.
        NotImplementedError: ``torch.export`` of a gradient.
    """
    refuse_export_of_term(x, term)
    x = x.dequantize() if isinstance(x, BlockwiseFP8Tensor) else x
    if offs is not None and y.dtype != torch.bfloat16 and is_compiling():
        raise TypeError(
            f"torch.compile of a grouped matmul with an adapter in {y.dtype}: torch compiles "
            f"grouped matmuls of bf16 alone; convert the model to bf16, or run it under "
            f"torch.autocast({y.device.type!r}, torch.bfloat16)"
        )
    rows = (x if x.ndim == 2 else x.reshape(-1, x.shape[-1])).to(y.dtype)
    b, a = _thin(term.b, y.dtype), _thin(term.a, y.dtype)
    if 0 in rows.shape or 0 in a.shape or 0 in b.shape:
        return y + (rows[:0].sum() + a[:0].sum() + b[:0].sum())  # gradients are zeros, not None
    matrix = y if y.ndim == 2 else y.reshape(-1, y.shape[-1])
    made: Tensor = _LowRank.apply(matrix, rows, a, b, term.scaling, offs)
    return made if y.ndim == 2 else given_out(made, y.shape)


def refuse_export_of_term(x: Tensor, term: LowRank) -> None:
    """Refuse gradients of a term and its input in ``torch.export``: see :func:`refuse_export`."""
    refuse_export(
        "an FP8 linear layer with an adapter, of which a gradient is recorded",
        "Export under torch.no_grad()",
        x,
        term.a,
        term.b,
    )


def _thin(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a thin matrix or stack contiguous in ``dtype``, in rows of whole 16-byte vectors.

    Its last two dimensions are padded with zeros: either may be contracted, and torch's grouped
    matmuls read vectors along each.
    """
    w = w.to(dtype, memory_format=torch.contiguous_format).contiguous()
    step = VECTOR_BYTES // dtype.itemsize
    rows, cols = -w.shape[-2] % step, -w.shape[-1] % step
    return F.pad(w, (0, cols, 0, rows)) if rows or cols else w


class _Rows(NamedTuple):
    """The groups of the rows of a term; all None for one matrix.

    Attributes:
        ends: int32 ``[E]``, the ends of the groups.
        all_ends: the same with the rows of no group in the last group, so that matmuls write them.
        outside: bool ``[T, 1]``, True for rows of no group.
    """

    ends: Tensor | None = None
    all_ends: Tensor | None = None
    outside: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, offs: Tensor | None) -> _Rows:
        """Describe the groups of the rows of ``x`` that end at ``offs``."""
        if offs is None:
            return cls()
        ends = ends_within(offs, x)
        all_ends = ends.clone()
        all_ends[-1:] = x.shape[0]
        outside = torch.arange(x.shape[0], device=x.device).unsqueeze(1) >= ends[-1:]
        return cls(ends, all_ends, outside)

    def scaled(self, u: Tensor, scaling: float) -> Tensor:
        """Scale thin rows in place, and set rows of no group to zeros."""
        if scaling != 1:
            u = u.mul_(scaling)
        return u if self.outside is None else u.masked_fill_(self.outside, 0)

    def times(self, x: Tensor, w: Tensor) -> Tensor:
        """Return ``x w`` of rows ``x[M, C]`` and ``w[C, D]``, or of groups and ``w[E, C, D]``."""
        if self.all_ends is None:
            return torch.mm(_widened(x, w.shape[0]), w)
        return torch._grouped_mm(_widened(x, w.shape[1]), w, offs=self.all_ends)

    def products(self, g: Tensor, x: Tensor) -> Tensor:
        """Return ``gᵀ x`` of rows ``g[M, C]`` and ``x[M, D]``, or of each group: ``[E, C, D]``."""
        g, x = in_vectors(g), in_vectors(x)  # as wide as the padded matrices
        return torch.mm(g.t(), x) if self.ends is None else torch._grouped_mm(g.t(), x, self.ends)


def _widened(x: Tensor, columns: int) -> Tensor:
    """Return rows as torch's grouped matmuls read them, with zeros up to ``columns`` columns."""
    x = x if x.shape[1] == columns else F.pad(x, (0, columns - x.shape[1]))
    return in_vectors(x)


class _LowRank(FP8Function):
    """The autograd function of one term, of rows as matrices and padded thin matrices."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float, offs: Tensor | None
    ) -> Tensor:
        with without_autocast(x):
            rows = _Rows.of(x, offs)
            u = rows.scaled(rows.times(x, a.transpose(-2, -1)), scaling)
            added = rows.times(u, b.transpose(-2, -1))
            # torch.compile fuses the sum; torch 2.11 returns no gradients if it is made in place
            in_place = added.shape == y.shape and not is_compiling()
            made = added.add_(y) if in_place else y + added[:, : y.shape[1]]
        needs_da, needs_db = ctx.needs_input_grad[2:4]
        kept = x if needs_da else None, u if needs_db else None
        ctx.save_for_backward(*kept, a, b, *rows)
        ctx.scaling, ctx.columns = scaling, x.shape[1]
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return run_backward(ctx, grads, _gradients, (True, True, True, True))


def _gradients(ctx: Any, saved: list[Any], grads: list[Any], asked: Sequence[bool]) -> Gradients:
    """Return the gradients of y, x, a and b, and None for the scaling and the groups."""
    g = grads.pop()
    x, u, a, b, *groups = saved
    if g is None:
        return (None,) * 6
    needs_dy, needs_dx, needs_da, needs_db = asked
    rows = _Rows(*groups)
    dx = da = db = None
    with without_autocast(g):
        if needs_dx or needs_da:
            v = rows.scaled(rows.times(g, b), ctx.scaling)
        if needs_dx:
            dx = rows.times(v, a)[:, : ctx.columns]
        if needs_da:
            da = rows.products(v, x)
        if needs_db:
            db = rows.products(g, u)
    return g if needs_dy else None, dx, da, db, None, None
