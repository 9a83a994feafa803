"""Views and copies of a BlockwiseFP8Weight: a weight, or a plain tensor of its master's values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktensor import BlockwiseFP8Weight
from tests.support.models import POWER_OF_TWO, linear, plain, randn


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w[:128],
        lambda w: w[3],
        lambda w: w[None],
        lambda w: w.view(-1),
        lambda w: w.expand(2, 256, 256),
        lambda w: w.chunk(2, 1)[1],
        lambda w: w.diagonal(),
        lambda w: w.view(2, 128, 256).transpose(0, 1),
    ],
)
def test_other_views_of_a_weight_are_plain_views_of_its_master(
    view: Callable[[Tensor], Tensor],
) -> None:
    w = linear(256, 256).weight
    got = view(w)
    assert type(got) is Tensor
    assert got.requires_grad
    assert got.data_ptr() == view(w.master).data_ptr()
    assert torch.equal(got, view(w.master))
    got.sum().backward()
    leaf = plain(w).requires_grad_()
    view(leaf).sum().backward()
    assert torch.equal(w.grad, leaf.grad)


def test_copies_and_casts_of_a_weight_are_weights() -> None:
    w = linear(128, 192, dtype=torch.float32, recipe=POWER_OF_TWO).weight
    x = randn(5, 192, dtype=torch.float32)
    for copied in (w.clone(), w.detach().clone(), w.bfloat16(), torch.empty_like(w), w.t().clone()):
        assert type(copied) is BlockwiseFP8Weight
        assert copied.recipe == POWER_OF_TWO
        assert copied.cache is not w.cache
    assert torch.equal(x @ w.t().clone(), F.linear(x, w))
    assert type(w.double()) is type(w.detach() + 1) is Tensor
