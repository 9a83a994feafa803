"""What only a GPU can show: peak memory, streams, and the bits of hundreds of drawn shapes."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blocktensor import BlockwiseFP8Weight, Recipe, functional, to_blockwise_fp8_weights
from blocktensor.autograd.matmuls import grouped_wgrad_in_high_precision
from blocktensor.autograd.norm import normed
from blocktensor.ops.norm.reference import rms_norm
from tests.support.gated import EAGER, assert_bits, results, unfused
from tests.support.linear_ways import assert_all_equal, grads_of
from tests.support.models import linear, randn, unaligned

pytestmark = pytest.mark.gpu


@pytest.mark.unchecked
def test_peak_memory_is_lower_by_the_bf16_copy_of_x() -> None:
    m, n, k = 4096, 18432, 7168

    def peak(convert: bool) -> int:
        module = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
        if convert:
            to_blockwise_fp8_weights(module)
        leaf = torch.ones(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3):  # a steady state: kernels loaded, workspaces taken, one cast a step
            module.zero_grad()
            leaf.grad = None
            torch.cuda.reset_peak_memory_stats()
            (module(leaf * 1) * 1).sum().backward()
            reached = torch.cuda.max_memory_allocated()
            with torch.no_grad():
                module.weight.mul_(0.5)
        return reached

    # before torch 2.13 autograd holds the gradient of y during its backward
    held = 0 if hasattr(torch.autograd.Function, "boxed_grads_call") else 2 * m * n
    assert peak(convert=False) - (peak(convert=True) - held) >= 2 * m * k


def test_between_steps_only_the_master_rests() -> None:
    def train(module: nn.Module) -> int:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            module(randn(512, 1024, device="cuda", grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.memory_allocated()

    train(linear(2048, 1024, device="cuda"))  # cuBLAS keeps a workspace for each thread
    module = linear(2048, 1024, device="cuda")
    before = torch.cuda.memory_allocated()
    assert train(module) <= before + 2**16


def test_on_a_stream_of_its_own() -> None:
    module, stream = linear(2048, 1024, device="cuda"), torch.cuda.Stream()
    x, grad = randn(512, 1024, device="cuda"), randn(512, 2048, seed=9, device="cuda")
    wanted = grads_of(module, x, grad)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = grads_of(module, x, grad)
    torch.cuda.current_stream().wait_stream(stream)
    assert_all_equal(got, wanted)


CASES = 200
ROWS = (1, 64, 128, 129, 300, 512)
FEATURES = (64, 128, 192, 264, 320, 512, 1096)
RECIPES = (Recipe(), Recipe(scale="power_of_two"), Recipe.deepseek())


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
        needs_dx = draw.random() < 0.9
        ws[draw.randrange(3)].requires_grad_(draw.random() < 0.8)
        fused = partial(functional.gated_mlp, activation=activation, recompute=recompute)
        eager = partial(unfused, activation=activation)
        for seed in (i, i + CASES):  # the second repeats recorded launches
            x = randn(rows, k, seed=seed, dtype=dtype, device="cuda") / 8  # fp16 holds 65,504
            x.requires_grad_(needs_dx)
            assert_bits(results(fused, x, ws), results(eager, x, ws))


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_norms(kind: Any) -> None:
    """Forward against the eager norm under autograd; backward too, whose ops are repeated."""
    draw = random.Random(kind)
    for i in range(CASES):
        rows, k, n = draw.choice(ROWS), draw.choice((*FEATURES, 4096)), draw.choice(FEATURES)
        w = weight(n, k, draw.choice(RECIPES), torch.bfloat16, i)
        x = randn(2, rows, k, seed=i, device="cuda", grad=True)
        gain = randn(k, seed=i + 1, device="cuda", grad=True)
        got, want = (
            results(lambda x, gain, w, norm=norm: F.linear(norm(x, gain), w), x, [gain, w])
            for norm in (
                partial(normed, eps=1e-6, kind=kind),
                partial(rms_norm, eps=1e-6, kind=kind),
            )
        )
        assert_bits(got, want)


@pytest.mark.unchecked
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


def test_grouped_wgrad_in_high_precision_takes_any_address() -> None:
    """As saved-tensor hooks may return x; torch's grouped matmul takes multiples of 16 alone."""
    x, grad = (unaligned(randn(256, 128, seed=seed, device="cuda")) for seed in range(2))
    offs = torch.tensor([100, 256], dtype=torch.int32, device="cuda")
    got = grouped_wgrad_in_high_precision(grad, x, offs, torch.bfloat16)
    want = grouped_wgrad_in_high_precision(grad.clone(), x.clone(), offs, torch.bfloat16)
    assert torch.equal(got, want)
