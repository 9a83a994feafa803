"""What all FP8 types inherit."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import linear


def test_a_weights_gradient_is_a_tensors() -> None:
    w = linear(256, 384).weight
    assert w.grad is None
    w.grad = grad = torch.ones(256, 384, dtype=w.dtype)
    assert w.grad is grad
    with pytest.raises(RuntimeError, match="size"):
        w.grad = torch.ones(3, dtype=w.dtype)
    del w.grad
    assert w.grad is None
