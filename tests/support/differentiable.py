"""All differentiable functions, and the number of products of their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blocktensor import functional
from blocktensor.autograd.norm import normed
from tests.support.groups import ends
from tests.support.linear_ways import run_linears
from tests.support.models import randn


def leaf(*shape: int, seed: int = 1) -> Tensor:
    return randn(*shape, seed=seed, grad=True)


def samples() -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], tuple[int, ...]]]:
    """Functions, their leaves, and the number of products of each leaf's gradient alone."""
    x, offs, target = leaf(70, 192), ends(30, 0, 40), torch.arange(70)
    mlp = leaf(160, 192), leaf(160, 192, seed=2), leaf(192, 160)
    experts = leaf(3, 160, 192), leaf(3, 160, 192, seed=2), leaf(3, 192, 160)
    biases = leaf(160), leaf(160), leaf(192)
    f = functional
    return {
        "linear": (f.linear, (x, mlp[0], leaf(160)), (1, 1, 0)),
        "grouped_linear": (
            lambda x, w, b: f.grouped_linear(x, w, offs, b),
            (x, experts[0], leaf(3, 160)),
            (1, 1, 0),
        ),
        "gated_mlp": (f.gated_mlp, (x, *mlp), (3, 2, 2, 1)),
        "gated_mlp, biases": (f.gated_mlp, (x, *mlp, *biases), (3, 2, 2, 1, 1, 1, 0)),
        "gated_mlp, gate and up in one": (
            lambda x, w, down: f.gated_mlp(x, w, None, down),
            (x, leaf(320, 192), mlp[2]),
            (2, 2, 1),
        ),
        "gated_experts": (
            lambda x, *ws: f.gated_experts(x, *ws, offs),
            (x, *experts),
            (3, 2, 2, 1),
        ),
        "normed": (lambda x, w: normed(x, w, 1e-6, "llama"), (x, leaf(192)), (0, 0)),
        "linear_cross_entropy": (
            lambda x, w, b: f.linear_cross_entropy(x, w, target, b),
            (x, mlp[0], leaf(160)),
            (0, 0, 0),
        ),
    }


NAMES = [*samples()]
BOTH_WAYS = ("linear", "gated_mlp", "gated_experts")  # to which the size of gradients matters


@pytest.fixture(params=[*NAMES, *(f"{name}; sequence" for name in BOTH_WAYS)])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One of ``NAMES``, whose linears run one way or the other."""
    name, _, way = request.param.partition("; ")
    run_linears(way or "op by op", monkeypatch)
    return name
