"""Gradients in batches (``torch.autograd.grad(..., is_grads_batched=True)``), which are refused."""

from __future__ import annotations

from typing import NoReturn

import torch

is_batched = torch._C._functorch.is_legacy_batchedtensor
"""Whether a gradient is one of a batch, for which no cast has a rule."""


def refuse_batched() -> NoReturn:
    """Raise for a gradient of a batch.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "torch.autograd.grad(..., is_grads_batched=True) through an FP8 linear, whose casts take "
        "one gradient: call it once for each gradient, with retain_graph=True"
    )
