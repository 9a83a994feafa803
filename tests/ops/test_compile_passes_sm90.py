"""Passes over elements compile for sm_90: RMS norms, the loss of logits, sums of split products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from blocktensor.ops.cross_entropy import triton_rows
from blocktensor.ops.gemm.hopper.launch import plan_sum
from blocktensor.ops.norm import triton_passes
from tests.support import sm90
from tests.support.numeric import DTYPES
from tests.support.sm90 import Launches, compile_for_sm90

launches = sm90.launches
FP32 = torch.float32


def like(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("shape", [(4096, 4096), (300, 576), (129, 576), (129, 131)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_norms(kind: Any, dtype: torch.dtype, shape: tuple[int, int], launches: Launches) -> None:
    """Without spills, and without a multiply-add, which would round once in place of twice."""
    x, row = like(*shape, dtype=dtype), like(shape[0], 1, dtype=FP32)
    weight = x[0]
    triton_passes.squares(x)
    triton_passes.normalize(x, row, weight, kind)
    triton_passes.gradient_terms(x, x, row, weight, kind, True)
    triton_passes.input_gradient(x, x, row, row, weight, kind)
    assert len(launches) == 4
    for launch in launches:
        made = compile_for_sm90(launch)
        assert made.spilled_bytes == 0
        assert made.registers <= 168
        assert "FFMA" not in made.sass


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [576, 2048, 2049])
def test_sums_of_splits(n: int, dtype: torch.dtype, launches: Launches) -> None:
    splits, out = like(7, 64, n, dtype=FP32), like(50, n, dtype=dtype)
    assert launches.compile(plan_sum(splits, like(n, dtype=dtype), out, False)) == 1
    assert launches.compile(plan_sum(splits, None, out, dtype == FP32)) == 1


@pytest.mark.parametrize("has_total", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_losses(dtype: torch.dtype, has_total: bool, launches: Launches) -> None:
    target = like(1024, dtype=torch.int64)
    total = like(dtype=torch.int64) if has_total else None
    for cols in (300, 128256):
        logits = like(1024, cols, dtype=dtype)
        args = logits, target, total, -100, None, 0.0
        assert launches.compile(lambda args=args: triton_rows.loss_and_gradient_(*args)) == 2  # type: ignore[misc]
