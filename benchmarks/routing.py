"""Tokens brought to the order of their experts and back, without atomic adds in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import blocktensor as bt


def inverse(order: Tensor) -> Tensor:
    """Of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def rows_of_tokens(x: Tensor, order: Tensor, top_k: int, recipe: bt.Recipe | None) -> Tensor:
    """``top_k`` rows of each token of ``x[tokens, dim]`` in this order; cast before, by a recipe.

    ``order[tokens * top_k]`` is a permutation of the rows that follow each other for each token.
    """
    rows: Tensor = _RowsOfTokens.apply(x, order, top_k, recipe)
    return rows


def permuted(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """``x[order]``; ``back`` is the inverse of ``order``."""
    rows: Tensor = _Permuted.apply(x, order, back)
    return rows


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


class _RowsOfTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int, recipe: bt.Recipe | None) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        if recipe is not None:
            x = bt.BlockwiseFP8Tensor.quantize(x, recipe=recipe, columnwise=False)
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        rows = grads[0].index_select(0, inverse(order))
        return rows.unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None
