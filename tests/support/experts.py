"""Shared by the tests of grouped linears: stacks, samples, and dense linears to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight, Recipe, functional
from tests.support.groups import GROUPS, ends, ranges
from tests.support.models import FP32_SCALES, randn

N, K = 144, 192


def stack(
    experts: int, *, recipe: Recipe = FP32_SCALES, dtype: Any = torch.bfloat16, kn: bool = False
) -> nn.Parameter:
    """Trainable experts ``[E, N, K]``, or ``[E, K, N]`` of the same values."""
    w = randn(experts, N, K, seed=1, dtype=dtype) / K**0.5
    return nn.Parameter(BlockwiseFP8Weight(w.mT.contiguous() if kn else w, recipe))


def expert_by_expert(
    x: Tensor, w: Tensor, offs: Tensor, grad: Tensor, bias: Tensor | None, recipe: Recipe
) -> tuple[list[Tensor], ...]:
    """y, dx, dw and dbias of each group, by dense FP8 linears; none for groups without rows."""
    results: tuple[list[Tensor], ...] = ([], [], [], [])
    for e, inside in enumerate(ranges(offs)):
        leaves = [x[inside], w[e], *([] if bias is None else [bias[e]])]
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        y = functional.linear(*leaves, recipe=recipe)
        y.backward(grad[inside])
        for made, value in zip(results, (y.detach(), *(t.grad for t in leaves)), strict=False):
            made.append(value)
    return results


def grads(
    run: Callable[..., Tensor], x: Tensor, grad: Tensor, *leaves: Tensor
) -> list[Tensor | None]:
    """The output and the gradients of x and of ``leaves``, from scratch."""
    leaf = x.detach().clone().requires_grad_()
    for parameter in leaves:
        parameter.grad = None
    y = run(leaf)
    y.backward(grad)
    return [y.detach(), leaf.grad, *(parameter.grad for parameter in leaves)]


def sample(groups: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """x, the output's gradient and offs; NaN in the rows of no group."""
    rows, sizes = GROUPS[groups]
    x, grad = (randn(rows, c, seed=c, dtype=dtype) for c in (K, N))
    x[sum(sizes) :] = grad[sum(sizes) :] = float("nan")
    return x, grad, ends(*sizes)
