"""Gated MLPs and norms on a GPU: in hundreds of drawn shapes, the bits of what they replace."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktensor import BlockwiseFP8Weight, Recipe, functional
from blocktensor.ops.norm.reference import rms_norm
from tests.support.gated import EAGER, assert_bits, results, unfused
from tests.support.models import randn

pytestmark = pytest.mark.gpu
CASES = 200
ROWS = (1, 64, 128, 129, 300, 512)
FEATURES = (64, 128, 192, 264, 320, 512, 1096)
RECIPES = (Recipe(), Recipe(scale="power_of_two"), Recipe(wgrad_input="128x128"))


def weight(n: int, k: int, recipe: Recipe, dtype: torch.dtype, seed: int) -> nn.Parameter:
    values = randn(n, k, seed=seed, dtype=dtype, device="cuda") / k**0.5
    return nn.Parameter(BlockwiseFP8Weight(values, recipe))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gated_mlps(dtype: torch.dtype) -> None:
    draw = random.Random(str(dtype))
    for i in range(CASES if dtype == torch.bfloat16 else CASES // 4):
        rows, k, hidden, n = draw.choice(ROWS), *(draw.choice(FEATURES) for _ in range(3))
        recipe, recompute = draw.choice(RECIPES), draw.random() < 0.3
        activation: Any = draw.choice(list(EAGER))
        ws = [weight(*shape, recipe, dtype, i) for shape in ((hidden, k), (hidden, k), (n, hidden))]
        x = randn(rows, k, seed=i, dtype=dtype, device="cuda") / 8  # fp16 holds 65,504 at most
        x.requires_grad_(draw.random() < 0.9)
        ws[draw.randrange(3)].requires_grad_(draw.random() < 0.8)

        def fused(
            *args: Tensor, activation: Any = activation, recompute: bool = recompute
        ) -> Tensor:
            return functional.gated_mlp(*args, activation=activation, recompute=recompute)

        def eager(*args: Tensor, activation: Any = activation) -> Tensor:
            return unfused(*args, activation=activation)

        assert_bits(results(fused, x, ws), results(eager, x, ws))


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_norms(kind: Any) -> None:
    """Forward against the eager norm under autograd; backward too, whose ops are repeated."""
    draw = random.Random(kind)
    for i in range(CASES):
        rows, k, n = draw.choice(ROWS), draw.choice((*FEATURES, 4096)), draw.choice(FEATURES)
        recipe = draw.choice(RECIPES)
        w = weight(n, k, recipe, torch.bfloat16, i)
        x = randn(2, rows, k, seed=i, device="cuda", grad=True)
        gain = randn(k, seed=i + 1, device="cuda", grad=True)

        def eager(x: Tensor, gain: Tensor, w: Tensor) -> Tensor:
            return F.linear(rms_norm(x, gain, 1e-6, kind), w)

        def fused(x: Tensor, gain: Tensor, w: Tensor, recipe: Recipe = recipe) -> Tensor:
            return F.linear(functional.rms_norm(x, gain, 1e-6, kind, recipe), w)

        assert_bits(results(fused, x, [gain, w]), results(eager, x, [gain, w]))


def test_nothing_of_h_is_allocated_in_high_precision() -> None:
    """A forward under no_grad holds gate, up, 1 byte of h for each element and one weight."""
    rows, k, hidden = 4096, 1024, 8192
    ws = [weight(*shape, Recipe(), torch.bfloat16, 0) for shape in ((hidden, k), (hidden, k))]
    ws.append(weight(k, hidden, Recipe(), torch.bfloat16, 1))
    x, peaks = randn(rows, k, device="cuda"), []
    for run in (functional.gated_mlp, unfused):
        for _ in range(3):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with torch.no_grad():
                run(x, *ws)
            peak = torch.cuda.max_memory_allocated() - before
        peaks.append(peak)
    of_h, of_weight, y = rows * hidden * (1 + 4 / 128), k * hidden, 2 * rows * k
    assert peaks[0] <= 1.01 * (2 * 2 * rows * hidden + of_h + of_weight + y)
    assert peaks[0] < peaks[1]
