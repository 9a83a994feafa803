"""Tokens brought to the order of their experts and back, without atomic adds in the backward.

On a GPU compiled kernels pick rows as they read them. Both precisions run the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def rows_of_tokens(x: Tensor, order: Tensor, back: Tensor, top_k: int) -> Tensor:
    """``top_k`` rows of each token of ``x[tokens, dim]`` in this order.

    ``order[tokens * top_k]`` is a permutation of the rows that follow each other for each token,
    and ``back`` its inverse.
    """
    rows: Tensor = _RowsOfTokens.apply(x, order, back, top_k)
    return rows


def permuted(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """``x[order]``; ``back`` is the inverse of ``order``."""
    rows: Tensor = _Permuted.apply(x, order, back)
    return rows


def combined(y: Tensor, weights: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """The weighted sum of each token's rows; ``y`` is in ``order``, whose inverse is ``back``.

    ``weights[tokens, top_k]``; returns ``[tokens, dim]``.
    """
    mixed: Tensor = _Combined.apply(y, weights, order, back)
    return mixed


def on_host(numbers: Tensor) -> Callable[[], list[Any]]:
    """Begin to copy them; what is returned waits for the copy alone, and not for work after it."""
    if numbers.device.type == "cpu":
        return numbers.tolist
    copied = torch.empty_like(numbers, device="cpu", pin_memory=True)
    copied.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def read() -> list[Any]:
        event.synchronize()
        return copied.tolist()

    return read


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for tensors on a GPU."""
    fused = torch.compile(function)

    def call(x: Tensor, *others: Any) -> Any:
        return (fused if x.is_cuda else function)(x, *others)

    return call


@_compiled
def _sum_of_rows(rows: Tensor, back: Tensor, top_k: int) -> Tensor:
    return rows[back].unflatten(0, (-1, top_k)).float().sum(1).to(rows.dtype)


@_compiled
def _combine(y: Tensor, weights: Tensor, back: Tensor) -> Tensor:
    rows = y[back].unflatten(0, weights.shape).float()
    return (rows * weights.float().unsqueeze(-1)).sum(1).to(y.dtype)


@_compiled
def _combine_backward(
    grad: Tensor, y: Tensor, weights: Tensor, order: Tensor, back: Tensor
) -> tuple[Tensor, Tensor]:
    token, weight = order // weights.shape[1], weights.flatten()[order].float()
    dy = (grad[token].float() * weight.unsqueeze(-1)).to(y.dtype)
    rows = y[back].unflatten(0, weights.shape).float()
    return dy, (rows * grad.float().unsqueeze(1)).sum(-1).to(weights.dtype)


class _RowsOfTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.top_k = top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (back,) = ctx.saved_tensors
        return _sum_of_rows(grads[0], back, ctx.top_k), None, None, None


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None


class _Combined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, order, back)
        mixed: Tensor = _combine(y, weights, back)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *_combine_backward(grads[0].contiguous(), *ctx.saved_tensors), None, None
