"""The sum of a product's splits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from blocktensor.ops.gemm.hopper.split_k import plan_sum
from tests.support.sm90 import compile_for_sm90

META = torch.device("meta")
SHAPES = ((1, 1), (3, 511), (64, 512), (5, 513), (130, 7168))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [2048, 2049])
def test_it_compiles_without_spills(dtype: torch.dtype, n: int) -> None:
    splits = torch.empty((7, 64, n), device=META)
    bias = torch.empty(n, dtype=dtype, device=META)
    out = torch.empty((50, n), dtype=dtype, device=META)
    assert compile_for_sm90(plan_sum(splits, bias, out, False)).spilled_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("count", [2, 7])
def test_parts_are_added_in_order(m: int, n: int, count: int) -> None:
    rng = torch.Generator("cuda").manual_seed(0)
    splits = torch.randn((count, m + 3, n), generator=rng, device="cuda")
    bias = torch.randn(n, generator=rng, device="cuda")
    whole = torch.randn((m, n + 5), generator=rng, device="cuda")
    out, before = whole[:, :n], whole.clone()
    want = splits[0, :m]
    for part in splits[1:]:
        want = want + part[:m]
    plan_sum(splits, None, out, False)()
    assert torch.equal(out, want)
    plan_sum(splits, bias, out, False)()
    assert torch.equal(out, want + bias)
    out.copy_(before[:, :n])
    plan_sum(splits, None, out, True)()
    assert torch.equal(out, want + before[:, :n])
    assert torch.equal(whole[:, n:], before[:, n:])
    rounded = torch.empty((m, n), dtype=torch.bfloat16, device="cuda")
    plan_sum(splits, None, rounded, False)()
    assert torch.equal(rounded, want.bfloat16())
