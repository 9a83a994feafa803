"""The launches of a Hopper GEMM, planned without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blocktensor.ops.devices import H200
from tests.support.interpreter import interpreted
from tests.support.models import randn
from tests.support.numeric import DTYPES

pytest.importorskip("triton")

from blocktensor.ops.gemm.hopper import launch
from blocktensor.ops.runtime.launch import Launch
from tests.support.sm90 import cast_like


@pytest.mark.parametrize("bias", [None, torch.empty(1024, device="meta")])
def test_batch_invariant_matmuls_are_not_cut_along_k(
    bias: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of parts of K would depend on the number of rows."""
    ran: list[Launch] = []
    monkeypatch.setattr(Launch, "__call__", lambda self: ran.append(self))
    monkeypatch.setattr(launch, "card", lambda device: H200)
    a, b = cast_like(16, 8192), cast_like(1024, 8192, rows=128)
    for batch_invariant, kernels in (
        (False, [launch.gemm_kernel, launch.sum_kernel]),
        (True, [launch.gemm_kernel]),
    ):
        launch.gemm(a, b, bias, torch.bfloat16, batch_invariant)
        assert [each.kernel for each in ran] == kernels
        assert ran[0].constants["OUT"].split == (not batch_invariant)
        ran.clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_the_sum_of_parts_of_k(dtype: torch.dtype) -> None:
    for m, n, splits, rows in ((5, 130, 2, 128), (3, 1, 7, 3), (2, 2000, 4, 64)):
        parts = randn(splits, rows, n, dtype=torch.float32)
        for bias in (None, randn(n, seed=1)):
            out = torch.empty(m, n + 8, dtype=dtype)[:, :n]
            launch.plan_sum(parts, bias, out)()
            want = parts[0, :m]
            for part in parts[1:]:
                want = want + part[:m]
            assert torch.equal(out, (want if bias is None else want + bias.float()).to(dtype))
