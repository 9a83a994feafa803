"""Backwards in two halves, as the zero-bubble schedules of torch's pipelining run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import stage

needs_halves = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="before 2.13 torch loses an autograd.Function between the halves (pytorch#166577)",
)


def backward(
    y: Tensor, grad: Tensor, x: Tensor, weights: Sequence[Any], in_halves: bool = True
) -> None:
    """Run ``y.backward(grad)``; in halves, for the gradient of ``x`` first, then of ``weights``."""
    if not in_halves:
        y.backward(grad)
        return
    _, groups = stage.stage_backward_input([y], [grad], [x], iter(weights))
    stage.stage_backward_weight(iter(weights), groups)
