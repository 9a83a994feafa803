"""Modules with linears that are given one input, and a count of the casts it takes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor import Recipe, convert, quantize
from blocktensor.ops import reference
from blocktensor.ops.formats import BlockFormat, Quantized
from tests.support.backends import replace_op
from tests.support.models import FP32_SCALES, randn
from tests.support.steps import assert_bits, step

K, N = 192, 160


class Qkv(nn.Module):
    """q, k, v of one input and o of another; ``by_hand`` is what share_inputs is to equal."""

    def __init__(self, by_hand: bool = False, between: Callable[[Tensor], Any] | None = None):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(K, N, bias=i == 0) for i in range(3))
        self.o = nn.Linear(N, K)
        self.by_hand, self.between = by_hand, between

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5  # an input that only this module and the graph hold
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        y = quantize(x.to(dtype), self.q.weight.recipe) if self.by_hand else x
        q = self.q(y)
        if self.between is not None:
            self.between(y)
        return self.o(torch.tanh(q + self.k(y)) * self.v(y))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(K, N), nn.Linear(K, N), nn.Linear(N, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def converted(model: nn.Module, recipe: Recipe = FP32_SCALES) -> nn.Module:
    for i, p in enumerate(model.parameters()):
        p.data = randn(*p.shape, seed=i, dtype=p.dtype) / 14
    convert(model, recipe, skip_small=False)
    return model


def results(
    model: nn.Module, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor] | None = None
) -> list[Tensor]:
    """y, and the gradients of x and of all parameters."""
    found = step((lambda x: run(model, x)) if run else model, x, of=[model])
    return [tensor for tensor in found if tensor is not None]


assert_same = assert_bits

X = randn(9, K, dtype=torch.float32)


class Casts(list[Tensor]):
    """What was cast in forwards: the high-precision matrices, and weakly the FP8 bytes."""

    bytes: list[weakref.ref[Tensor]]

    def alive(self) -> int:
        return sum(ref() is not None for ref in self.bytes)


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Casts:
    """:func:`watched_casts` of one test."""
    return watched_casts(monkeypatch)


def watched_casts(monkeypatch: pytest.MonkeyPatch) -> Casts:
    """Filled by every cast in 1x128 blocks from now on; a cast of both forms counts once."""
    seen, lock, busy = Casts(), threading.Lock(), threading.local()
    seen.bytes = []

    def watch(name: str) -> None:
        cast = getattr(reference, name)

        def watched(x: Tensor, *formats: BlockFormat) -> Any:
            outer, busy.inside = getattr(busy, "inside", False), True
            made = cast(x, *formats)
            busy.inside = outer
            if not outer and not formats[0].transposes:
                rowwise = made if isinstance(made, Quantized) else made[0]
                with lock:
                    seen.append(x.detach().clone())
                    seen.bytes.append(weakref.ref(rowwise.data))
            return made

        replace_op(monkeypatch, name, watched)

    watch("quantize_both"), watch("quantize_rowwise")
    return seen
