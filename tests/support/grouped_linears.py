"""Operands of grouped linear layers, and their gradients from scratch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight, Recipe, functional
from tests.support.groups import GROUPS, ends
from tests.support.models import FP32_SCALES, randn

N, K = 144, 192
every_grouping = pytest.mark.parametrize("groups", GROUPS)


def stack(
    experts: int, *, recipe: Recipe = FP32_SCALES, dtype: Any = torch.bfloat16, kn: bool = False
) -> nn.Parameter:
    """Trainable experts ``[E, N, K]``, or ``[E, K, N]`` of the same values."""
    w = randn(experts, N, K, seed=1, dtype=dtype) / K**0.5
    return nn.Parameter(BlockwiseFP8Weight(w.mT.contiguous() if kn else w, recipe))


def sample(groups: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """x, the output's gradient and offs; NaN in the rows of no group."""
    rows, sizes = GROUPS[groups]
    x, grad = (randn(rows, c, seed=c, dtype=dtype) for c in (K, N))
    x[sum(sizes) :] = grad[sum(sizes) :] = float("nan")
    return x, grad, ends(*sizes)


def grads(run: Callable[..., Tensor], x: Tensor, grad: Tensor, *leaves: Tensor) -> list[Any]:
    """The output and the gradients of x and of ``leaves``, from scratch."""
    leaf = x.detach().clone().requires_grad_()
    for parameter in leaves:
        parameter.grad = None
    y = run(leaf)
    y.backward(grad)
    return [y.detach(), leaf.grad, *(parameter.grad for parameter in leaves)]


def natural(w: Tensor) -> Tensor:
    """A stack as ``[E, N, K]``, however it lies."""
    return w if w.shape[-1] == K else w.mT


def grads_of(
    x: Tensor, w: Any, offs: Tensor, grad: Tensor, bias: Tensor | None = None, **options: Any
) -> list[Any]:
    """Y and the gradients of x and of what is trained, from scratch."""
    leaves = [t for t in (w, bias) if t is not None and t.requires_grad]
    return grads(
        lambda t: functional.grouped_linear(t, natural(w), offs, bias, **options), x, grad, *leaves
    )
