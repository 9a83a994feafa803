"""The kernels of the loss of logits compile for sm_90, without a GPU, and spill nothing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from blocktensor.ops.cross_entropy import triton_rows
from blocktensor.ops.runtime.launch import Launch
from tests.support.numeric import DTYPES
from tests.support.sm90 import compile_for_sm90


@pytest.mark.parametrize("has_total", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compile(dtype: torch.dtype, has_total: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Launch] = []
    monkeypatch.setattr(Launch, "__call__", lambda launch: launches.append(launch))
    for cols in (300, 128256):
        logits = torch.empty((1024, cols), dtype=dtype, device="meta")
        target = torch.empty((1024,), dtype=torch.int64, device="meta")
        total = torch.empty((), dtype=torch.int64, device="meta") if has_total else None
        triton_rows.loss_and_gradient_(logits, target, total, -100, None, 0.0)
    assert len(launches) == 4
    for launch in launches:
        assert compile_for_sm90(launch).spilled_bytes == 0
