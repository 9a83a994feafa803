"""Recipe(batch_invariant=True): rows of an output have the same bits beside any other rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import Recipe, functional, fuse
from blocktensor.ops.gemm import ops
from tests.support.backends import Watched
from tests.support.mlps import MLP, K, converted
from tests.support.models import linear, randn

INVARIANT = Recipe(batch_invariant=True)


def made(like: Tensor, **options: Any) -> nn.Linear:
    return linear(2048, like.shape[1], recipe=INVARIANT, device=like.device, **options)


def weight(like: Tensor) -> Tensor:
    return randn(2048, like.shape[1], seed=1, device=like.device, grad=True)


def fused(x: Tensor) -> Tensor:
    model = converted(MLP(), INVARIANT).to(x.device)
    fuse(model)
    return model(x[:, :K].contiguous())


def cross_entropy(x: Tensor) -> Tensor:
    target = torch.arange(len(x)) % 2048
    return functional.linear_cross_entropy(x, weight(x), target, recipe=INVARIANT)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "module": lambda x: made(x, bias=True)(x),
    "frozen module": lambda x: made(x, frozen=True)(x),
    "mm": lambda x: x @ made(x, frozen=True).weight.t(),
    "function": lambda x: functional.linear(x, weight(x), recipe=INVARIANT),
    "fused MLP": fused,
}


@pytest.mark.not_repeated
@pytest.mark.parametrize("name", [*CALLS, "cross entropy"])
def test_every_forward_asks_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, ops, "choose_gemm")
    {**CALLS, "cross entropy": cross_entropy}[name](randn(130, 192, grad=True)).sum().backward()
    asked = [p.batch_invariant for p in watched.problems if p.m == 130]
    forward = 2 if name == "fused MLP" else 1
    assert asked == [True] * forward + [False] * forward


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CALLS if name != "fused MLP"])  # it is small
def test_rows_keep_their_bits(name: str) -> None:
    x = randn(4096, 7168, device="cuda")
    want = CALLS[name](x)
    for rows in (1, 3, 64, 65, 300):
        assert torch.equal(CALLS[name](x[:rows].contiguous()), want[:rows])
        assert torch.equal(CALLS[name](x[-rows:].contiguous()), want[-rows:])


@pytest.mark.gpu
def test_without_it_they_do_not() -> None:
    x = randn(4096, 7168, device="cuda")
    w = weight(x)
    assert not torch.equal(functional.linear(x[:64], w), functional.linear(x, w)[:64])
