"""The input of a parallel linear between forward and backward, for the gradient of its weight.

Each rank saves its own tokens alone. Their columnwise form is saved and gathered in FP8 if its
blocks are those of all tokens; else the tokens are, as they came, and cast after the gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from ...autograd import high_precision
from ...autograd.linear_plan import LinearPlan
from ...ops.cast.ops import quantize_columnwise
from ...ops.formats import BlockFormat, Quantized
from ...ops.gemm.ops import gemm
from ...tensor.aot_autograd import kept_in_backward
from .collectives import Pending, ready
from .token_shards import TokenShards

Saved = tuple[Tensor | None, Tensor | None]
"""Columnwise data and scale; or the tokens as they came, and None."""


def is_gathered_in_fp8(format: BlockFormat | None, tokens: TokenShards | None) -> bool:
    """Whether the form of all tokens is that of the parts; ``format`` None: high precision."""
    return format is not None and (tokens is None or tokens.on_grid(format))


def gather_saved(saved: Saved, plan: LinearPlan, tokens: TokenShards | None) -> Pending[object]:
    """Begin to gather what the weight gradient reads of all tokens: a columnwise form, or them."""
    x, scale = saved
    assert x is not None
    format = plan.x_columnwise
    if scale is not None:
        assert format is not None
        form = Quantized(x, scale, format)
        return ready(form) if tokens is None else tokens.gather_columnwise(form)  # type: ignore[return-value]
    rows = x.reshape(-1, x.shape[-1])
    whole = ready(rows) if tokens is None else tokens.gather_plain(rows)
    if format is None:
        return whole  # type: ignore[return-value]
    return Pending((), lambda: quantize_columnwise(whole.wait(), format))


class SharedGather:
    """One gather in backward for all linears that read one input.

    Attributes:
        users: the linears whose backwards will ask.
    """

    def __init__(self) -> None:
        self.users = self._left = 0
        self._pending: Pending[object] | None = None

    def begin(self, saved: Saved, plan: LinearPlan, tokens: TokenShards | None) -> Pending[object]:
        """:func:`gather_saved`, begun by the first that asks and dropped after the last."""
        if self._pending is None:
            with kept_in_backward() if plan.tracing else nullcontext():
                self._pending = gather_saved(saved, plan, tokens)
            self._left = self.users
        pending, self._left = self._pending, self._left - 1
        if self._left <= 0:
            self._pending = None
        return pending


def wgrad(grad: Quantized | Tensor, x: object, out_dtype: torch.dtype) -> Tensor:
    """``dw[N, K]`` of all tokens: of both columnwise forms, or in high precision of both."""
    if isinstance(grad, Quantized):
        assert isinstance(x, Quantized)
        return gemm(grad, x, None, out_dtype)
    assert isinstance(x, Tensor)
    return high_precision.wgrad(grad, x, out_dtype)


def without_front(rows: Tensor, front: int, dim: int) -> Tensor:
    """A result without the rows or columns that belong to zeros in front of a weight's part."""
    return rows.narrow(dim, front, rows.shape[dim] - front).contiguous() if front else rows


def saved_tensors(saved: Sequence[Tensor | None]) -> tuple[Saved, Sequence[Tensor]]:
    """What was saved of the input, and of the weight."""
    x, scale, *weight = saved
    return (x, scale), weight  # type: ignore[return-value]
