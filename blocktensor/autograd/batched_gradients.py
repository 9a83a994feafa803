"""Gradients in batches (``torch.autograd.grad(..., is_grads_batched=True)``), which are refused."""

from __future__ import annotations

import torch
from torch import Tensor


def is_batched(grad: Tensor) -> bool:
    """Whether a gradient is one of a batch, for which no cast has a rule."""
    return torch._C._functorch.is_legacy_batchedtensor(grad)


def refuse_batched(grad: Tensor | None) -> None:
    """Raise for a gradient of a batch.

    Raises:
        NotImplementedError: that.
    """
    if grad is not None and is_batched(grad):
        raise NotImplementedError(
            "torch.autograd.grad(..., is_grads_batched=True) through an FP8 linear, whose casts "
            "take one gradient: call it once for each gradient, with retain_graph=True"
        )
