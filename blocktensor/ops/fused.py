"""A linear's forward and backward, each as one op: what costs a small linear the least host time.

Where all that a sequence of ops does is to allocate and launch, the sequence is recorded and
replayed as a whole, and what it keeps to itself shares one allocation. Elsewhere its ops run one by
one. The bits are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import backends, library
from .pinned import Ops, Pinned


def forward(
    ops: Ops,
    x: Tensor,
    w_data: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    power_of_two: bool,
    out_dtype: torch.dtype,
    columnwise: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``x[M, K] wᵀ (+ bias)`` in ``out_dtype``; and the columnwise form of x, if asked for."""
    if columnwise:
        row, row_scale, col, col_scale = ops.quantize_both(x, power_of_two)
    else:
        row, row_scale = ops.quantize_rowwise(x, power_of_two)
        col = col_scale = None
    return ops.product(row, row_scale, w_data, w_scale, bias, out_dtype), col, col_scale


def backward(
    ops: Ops,
    wgrad_ops: Ops,
    grad: Tensor,
    x_data: Tensor,
    x_scale: Tensor,
    w_data: Tensor,
    w_scale: Tensor,
    power_of_two: bool,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The gradients of x and w from that of the output, ``grad[M, N]``.

    Args:
        ops, wgrad_ops: what runs all ops but the last, and the last.
        grad: high precision.
        x_data, x_scale: the columnwise form of x.
        w_data, w_scale: the rowwise form of w.
        power_of_two: how scales of ``grad`` are rounded.
        x_dtype, w_dtype: of the results.
    """
    row, row_scale, col, col_scale = ops.quantize_both(grad, power_of_two)
    w_col, w_col_scale = ops.transpose_square(w_data, w_scale)
    dx: Tensor = ops.product(row, row_scale, w_col, w_col_scale, None, x_dtype)
    dw: Tensor = wgrad_ops.product(col, col_scale, x_data, x_scale, None, w_dtype)
    return dx, dw


class Sequence:
    """``function``, for calls of one kind that nobody needs to see.

    Attributes:
        run: takes what ``function`` takes after its ``ops``.
    """

    __slots__ = ("_function", "_ops", "_recording", "run")

    def __init__(self, function: Callable[..., Any], ops: int) -> None:
        """For a function whose first ``ops`` arguments are where it finds its ops."""
        self._function, self._ops = function, ops
        self._recording: Any = None
        self.run: Callable[..., Any] = self._first

    def _first(self, *args: Any) -> Any:
        recording = self._recording
        if recording is None:
            record = backends.recorder(args[0].device)
            if record is None:
                return self._one_by_one()(*args)
            plain = functools.partial(self._function, *self._ops * [_PLAIN])
            recording = self._recording = record(plain)
        result = recording(*args)
        if recording.recorded:
            self.run = recording.settled
        elif recording.settled is not None:
            self._one_by_one()
        return result

    def _one_by_one(self) -> Callable[..., Any]:
        self.run = functools.partial(self._function, *(Pinned() for _ in range(self._ops)))
        return self.run


class _Plain:
    """Ops as the functions of the modules that run them, as a recording needs them."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def plain(x: Tensor, *args: Any) -> Any:
            choose = backends.transpose_module if "transpose" in name else backends.cast_module
            return getattr(choose(x), name)(x, *args)

        return plain

    def product(self, *operands_and_dtype: Any) -> Tensor:
        module, operands = library.chosen(*operands_and_dtype)
        out: Tensor = module.gemm(*operands, operands_and_dtype[-1])
        return out


_PLAIN = _Plain()
