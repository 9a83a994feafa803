"""The specification of the loss of logits and its gradient: torch's own ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def loss_and_gradient_(
    logits: Tensor, target: Tensor, total: Tensor | None, ignore_index: int
) -> Tensor:
    """Return the sum of the cross-entropies of rows of logits, over ``total``.

    Args:
        logits: ``[T, V]`` bf16, fp16 or fp32, taken in fp32. The gradient of the result, rounded to
            their dtype, is written over them: zeros in an ignored row, whatever was in it.
        target: int64 ``[T]``, the indices of classes.
        total: a scalar; None for 1.
        ignore_index: as in ``F.cross_entropy``.

    Returns:
        An fp32 scalar.
    """
    leaf = logits.detach().requires_grad_()
    # hooks that offload what a forward saves would move all logits
    keep = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.enable_grad(), keep:
        made = loss(leaf, target, total, ignore_index)
        (gradient,) = torch.autograd.grad(made, leaf)
    logits.copy_(gradient.masked_fill_((target == ignore_index)[:, None], 0))
    return made.detach()


def loss(logits: Tensor, target: Tensor, total: Tensor | None, ignore_index: int) -> Tensor:
    """Return the result of :func:`loss_and_gradient_` alone."""
    made = F.cross_entropy(logits.float(), target, reduction="sum", ignore_index=ignore_index)
    return made if total is None else made / total
