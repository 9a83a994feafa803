"""Compute the matmuls of a linear layer whose weight is cut between ranks.

::

    Colwise   fprop  y_r  = x · w_rᵀ          x gathered rowwise in FP8
              dgrad  dx   = Σ_r g_r · w_r     partial sums, reduced in high precision
              wgrad  dw_r = g_rᵀ · x          x gathered columnwise in FP8, during dgrad

    Rowwise   fprop  y    = Σ_r x_r · w_rᵀ    partial sums, reduced in high precision
              dgrad  dx_r = g · w_r           g gathered rowwise in FP8
              wgrad  dw_r = gᵀ · x_r          g gathered columnwise in FP8, during dgrad

Nothing is gathered if every rank has all tokens. Each rank saves only its own tokens. Their
columnwise form is gathered in FP8 if a cast of all tokens has the same blocks; else the tokens are
gathered in their own dtype and then cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd.backward import given_out
from ..autograd.linear import FP8Linear
from ..autograd.matmuls import Dense, Saved, multiply, saved_of, sum_rows
from ..autograd.plan import Plan, plan_matmul
from ..autograd.saved_weight import WeightRead
from ..ops.cast.ops import quantize_columnwise
from ..ops.formats import BlockFormat, Quantized
from ..ops.gemm.ops import gemm
from ..tensor.fp8_tensor import BlockwiseFP8Tensor
from ..tensor.torch_internals.aot_autograd import kept_in_backward
from .collectives import Pending, Reduction, TokenShards, ready
from .weight_part import WeightPart, read_part


def parallel_linear(x: Tensor, w: Tensor, bias: Tensor | None, matmul: Dense) -> Tensor:
    """Return this rank's output of ``x wᵀ + bias``.

    Args:
        x: ``[..., K]``, or this rank's part of it.
        w: this rank's part of the FP8 weight ``[N, K]``.
        bias: this rank's part for :class:`Colwise`, the whole bias for :class:`Rowwise`.
        matmul: the matmul of this call.

    Raises:
        TypeError, ValueError: see :func:`blocktensor.functional.linear`; also for an FP8 input if
            tokens or the weight are cut inside blocks.
    """
    with torch._C.DisableTorchFunctionSubclass():
        plan = plan_matmul(x, w, bias, None)
        if plan.plain_dgrad or plan.saves_rows:
            raise NotImplementedError(
                f"a tensor parallel FP8 linear layer {list(w.shape)} whose recipe computes "
                f"gradients of dequantized operands, or data gradients in high precision: convert "
                f"with backward='fp8'; wgrad_input='high_precision' works"
            )
        if plan.casts_x:
            x = x.to(plan.out_dtype)
        y: Tensor = FP8Linear.apply(x, w, bias, None, plan, matmul)
        if x.ndim == 2:
            return y
        return given_out(y, (*matmul.output_shape(x.shape)[:-1], y.shape[1]))


class _Parallel(Dense):
    """A matmul with this rank's part of a weight.

    Args:
        tokens: how tokens are cut; None if every rank has all of them.
        reduction: how partial sums are added; None returns them.
        part: the place of the weight in the whole, if parts begin or end inside blocks.
    """

    def __init__(
        self, tokens: TokenShards | None, reduction: Reduction | None, part: WeightPart | None
    ) -> None:
        self.tokens, self.reduction, self.part = tokens, reduction, part
        self.front = 0 if part is None else part.front

    def weight(self, w: Tensor, plan: Plan) -> WeightRead:
        """Read this rank's part of the weight."""
        return read_part(w, self.part, plan)

    def _without_front(self, x: Tensor, dim: int) -> Tensor:
        """Copy a gradient without the rows or columns for the zeros in front of a part of a weight.

        Not a view of the rows: a model is deep-copied with its gradients, and DTensors whose local
        part begins inside its storage cannot be.
        """
        if not self.front:
            return x
        part = x.narrow(dim, self.front, x.shape[dim] - self.front)
        return part.clone(memory_format=torch.contiguous_format)


class Colwise(_Parallel):
    """The matmuls of a weight cut along its outputs: every rank computes some columns of y."""

    _gather: SharedGather
    _read_tokens: TokenShards | None

    def input(self, x: Tensor, plan: Plan) -> tuple[Any, Saved]:
        """Begin to gather the rowwise form of x; save this rank's tokens."""
        x_row, saved = self._cast(x, plan)
        self._gather.users += plan.needs[1]
        pending = ready(x_row) if self.tokens is None else self.tokens.gather_rowwise(x_row)
        return pending, saved if plan.needs[1] else (None, None)

    def _cast(self, x: Tensor, plan: Plan) -> tuple[Any, Saved]:
        if isinstance(x, BlockwiseFP8Tensor) and x.prepared is not None:
            shared: Any = x.prepared  # a SharedInput
            self._gather, self._read_tokens = shared.gather, shared.tokens
            return x.rowwise(), shared.saved
        self._gather, self._read_tokens = SharedGather(), self.tokens
        in_fp8 = is_gathered_in_fp8(plan.x_columnwise, self.tokens)
        saves_tokens = plan.needs[1] and not in_fp8
        if saves_tokens and not plan.saves_x and isinstance(x, BlockwiseFP8Tensor):
            raise ValueError(
                f"the FP8 input {list(x.shape)} of a ColwiseParallel linear layer is cut where its "
                f"columnwise blocks of {plan.format.cols} tokens do not begin: pass the "
                f"high-precision tensor, or pad the tokens of each rank to a multiple of "
                f"{plan.format.cols}"
            )
        row, col = self.forms(x, plan.format, plan.x_columnwise if in_fp8 else None)
        return row, (x, None) if saves_tokens and not plan.saves_x else saved_of(x, row, col, plan)

    def fprop(self, x: Any, w: Quantized | Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
        """Return this rank's columns of y for all tokens."""
        if bias is not None and self.front:
            bias = F.pad(bias, (self.front, 0))
        return self._without_front(super().fprop(x.wait(), w, bias, plan), 1)

    def output_shape(self, shape: Sequence[int]) -> Sequence[int]:
        """Return the shape of all tokens."""
        return shape if self.tokens is None else self.tokens.whole_shape(shape)

    def wgrad_input(self, saved: Saved, plan: Plan) -> Any:
        """Begin to gather what wgrad reads of all tokens."""
        return self._gather.begin(saved, plan, self._read_tokens)

    def grad_forms(
        self, grad: Tensor, plan: Plan, needs_dx: bool, needs_dw: bool
    ) -> tuple[Any, Any]:
        """Return what dgrad and wgrad read of the gradient of this rank's columns."""
        grad = grad.reshape(-1, grad.shape[-1])
        behind = F.pad(grad, (self.front, 0)) if self.front else grad
        row, col = plan.grad_formats
        g_row, g_col = self.forms(behind, row if needs_dx else None, col if needs_dw else None)
        return g_row, grad if plan.saves_x else g_col

    def dgrad(self, g: Any, w: Quantized | Tensor, plan: Plan) -> Any:
        """Begin to reduce the partial sums of dx."""
        if self.reduction is None:
            return ready(super().dgrad(g, w, plan))
        assert isinstance(w, Quantized)  # parallel_linear refuses dgrad in high precision
        partial = gemm(g, w, None, self.reduction.wire(plan.x_dtype))
        if self.tokens is None:
            return self.reduction.all_reduce(partial)
        return self.tokens.reduce_scatter(partial, self.reduction)

    def wgrad(self, g: Any, x: Any, plan: Plan) -> Tensor:
        """Return the gradient of this rank's rows of the weight."""
        dw = super().wgrad(g, x.wait(), plan)
        return self._without_front(dw, 0) if isinstance(g, Quantized) else dw

    def finish(self, dx: Any, dbias: Any, plan: Plan) -> tuple[Tensor | None, Tensor | None]:
        """Wait for dx."""
        return super().finish(None if dx is None else dx.wait().to(plan.x_dtype), dbias, plan)


class Rowwise(_Parallel):
    """The matmuls of a weight cut along its inputs: every rank computes a partial sum of y."""

    reduction: Reduction

    def input(self, x: Tensor, plan: Plan) -> tuple[Any, Saved]:
        """Cast this rank's columns of x."""
        if self.part is not None and isinstance(x, BlockwiseFP8Tensor):
            raise ValueError(
                f"the FP8 input {list(x.shape)} of a RowwiseParallel linear layer whose weight is "
                f"cut off the grid of {plan.format.cols} inputs: pass the high-precision tensor"
            )
        behind = F.pad(x, (self.front, 0)) if self.front else x
        x_row, x_col = self.forms(behind, plan.format, plan.x_columnwise)
        return x_row, saved_of(x, x_row, x_col, plan)

    def fprop(self, x: Any, w: Quantized | Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
        """Return the sum over all ranks, for this rank's tokens or for all tokens."""
        wire = self.reduction.wire(plan.out_dtype)
        partial = multiply(x, w, None, wire, plan)
        if self.tokens is None:
            y = self.reduction.all_reduce(partial).wait()
        else:
            y = self.tokens.reduce_scatter(partial, self.reduction).wait()
        if bias is not None:
            y = y.float() + bias.float()
        # not a view, which the caller could not modify in place
        return torch.ops.aten._unsafe_view(y.to(plan.out_dtype), y.shape)

    def output_shape(self, shape: Sequence[int]) -> Sequence[int]:
        """Return the shape of this rank's tokens, or of all tokens."""
        return shape if self.tokens is None else self.tokens.part_shape(shape)

    def dbias(self, grad: Tensor, plan: Plan) -> Any:
        """Begin to add the gradient of the bias in fp32; every rank has the whole bias."""
        own = sum_rows(grad, torch.float32)
        return ready(own) if self.tokens is None else self.reduction.all_reduce(own)

    def wgrad_input(self, saved: Saved, plan: Plan) -> Any:
        """Return what wgrad reads of this rank's columns of x."""
        return gather_saved(saved, plan, None)

    def grad_forms(
        self, grad: Tensor, plan: Plan, needs_dx: bool, needs_dw: bool
    ) -> tuple[Any, Any]:
        """Begin to gather what dgrad, then what wgrad reads of the gradient of all tokens."""
        row, col = plan.grad_formats
        tokens, grad = self.tokens, grad.reshape(-1, grad.shape[-1])
        in_fp8 = is_gathered_in_fp8(col, tokens)
        g_row, g_col = self.forms(
            grad, row if needs_dx else None, col if needs_dw and in_fp8 else None
        )
        if tokens is None:
            return ready(g_row), ready(grad if plan.saves_x else g_col)
        dgrad_reads = None if g_row is None else tokens.gather_rowwise(g_row)
        if not needs_dw:
            return dgrad_reads, None
        if g_col is not None:
            return dgrad_reads, tokens.gather_columnwise(g_col)
        return dgrad_reads, _cast_later(tokens.gather_plain(grad), col)

    def dgrad(self, g: Any, w: Quantized | Tensor, plan: Plan) -> Any:
        """Return this rank's columns of dx."""
        return self._without_front(super().dgrad(g.wait(), w, plan), 1)

    def wgrad(self, g: Any, x: Any, plan: Plan) -> Tensor:
        """Return the gradient of this rank's columns of the weight."""
        dw = super().wgrad(g.wait(), x.wait(), plan)
        return dw if plan.saves_x else self._without_front(dw, 1)

    def finish(self, dx: Any, dbias: Any, plan: Plan) -> tuple[Tensor | None, Tensor | None]:
        """Wait for the gradient of the bias."""
        return super().finish(dx, None if dbias is None else dbias.wait().to(plan.bias_dtype), plan)


def is_gathered_in_fp8(format: BlockFormat | None, tokens: TokenShards | None) -> bool:
    """Return True if parts have the same columnwise blocks as all tokens, in this format."""
    return format is not None and (tokens is None or tokens.on_grid(format))


def gather_saved(saved: Saved, plan: Plan, tokens: TokenShards | None) -> Pending[Any]:
    """Begin to gather what wgrad reads of all tokens, from the saved tensors of each rank."""
    x, scale = saved
    assert x is not None
    format = plan.x_columnwise
    if scale is not None:
        assert format is not None
        form = Quantized(x, scale, format)
        return ready(form) if tokens is None else tokens.gather_columnwise(form)
    rows = x.reshape(-1, x.shape[-1])
    return _cast_later(ready(rows) if tokens is None else tokens.gather_plain(rows), format)


def _cast_later(rows: Pending[Tensor], format: BlockFormat | None) -> Pending[Any]:
    """Cast gathered rows columnwise; with format None, leave them in high precision."""
    if format is None:
        return rows
    return Pending((), lambda: quantize_columnwise(rows.wait(), format))


class SharedGather:
    """One gather in backward for all linear layers that read one input.

    Attributes:
        users: how many linear layers will ask in their backwards.
    """

    def __init__(self) -> None:
        self.users = self._left = 0
        self._pending: Pending[Any] | None = None

    def begin(self, saved: Saved, plan: Plan, tokens: TokenShards | None) -> Pending[Any]:
        """Begin :func:`gather_saved` for the first linear layer; drop the result after the last."""
        if self._pending is None:
            with kept_in_backward() if plan.tracing else nullcontext():
                self._pending = gather_saved(saved, plan, tokens)
            self._left = self.users
        pending, self._left = self._pending, self._left - 1
        if self._left <= 0:
            self._pending = None
        return pending
