"""A direction of a linear as one sequence: recorded where its ops only allocate and launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from blocktensor.autograd.linear import _dgrad_and_wgrad, _fprop
from blocktensor.ops.cast.ops import quantize_both, quantize_with_transpose
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BlockFormat
from blocktensor.ops.gemm.ops import gemm
from blocktensor.ops.runtime.specialize import Specialized, recorded
from tests.support.fake_driver import axpy, draw, fake_driver, op
from tests.support.models import assert_same_bytes, randn

__all__ = ["fake_driver"]

M, N, K = 6, 256, 384


class Sequence:
    """Two calls of one op, which finds its decision in a table as the package's ops do."""

    def __init__(self) -> None:
        self.op, self.calls = op(axpy), 0
        self.run = recorded(self._twice)

    def _twice(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return self.op.call(self.op.call(x, y, 2), y, 3)


@pytest.mark.usefixtures("fake_driver")
def test_launches_of_all_ops_are_replayed_as_one() -> None:
    sequence = Sequence()
    kernel = sequence.op.kernel
    for _ in range(3):
        x, y = draw(2, 8)
        assert torch.equal(sequence.run(x, y), 6 * x + 4 * y)
    assert (sequence.calls, kernel.ordinary, len(kernel.direct)) == (1, 2, 4)
    assert sequence.run.is_recorded


@pytest.mark.usefixtures("fake_driver")
def test_a_replayed_sequence_looks_for_no_decision_of_its_ops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequence, (x, y) = Sequence(), draw(2, 8)
    sequence.run(x, y)
    assert len(sequence.op.table) == 0  # a part of a recording is decided for it alone
    monkeypatch.setattr(Specialized, "find", None)
    monkeypatch.setattr(Specialized, "run", None)
    assert torch.equal(sequence.run(x, y), 6 * x + 4 * y)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("columnwise", [None, BLOCKS_1X128, BLOCKS_128X128], ids=str)
@pytest.mark.parametrize("records", [False, True])
def test_forward_and_backward_are_their_ops(
    bias: bool, columnwise: BlockFormat | None, records: bool, device: torch.device
) -> None:
    """On a GPU recorded at the first call where that can be; on a CPU called every time."""
    x, grad = randn(M, K, device=device), randn(M, N, seed=1, device=device)
    w, w_col = quantize_with_transpose(randn(N, K, seed=2, device=device), BLOCKS_128X128)
    b = randn(N, seed=3, device=device) if bias else None
    x_row, x_col = quantize_both(x, BLOCKS_1X128, columnwise)
    g_row, g_col = quantize_both(grad, BLOCKS_1X128)
    wanted = (
        gemm(x_row, w, b, torch.bfloat16),
        gemm(g_row, w_col, None, torch.bfloat16),
        gemm(g_col, x_col, None, torch.float32),
    )
    plan: Any = SimpleNamespace(
        format=BLOCKS_1X128,
        x_columnwise=columnwise,
        out_dtype=torch.bfloat16,
        x_dtype=torch.bfloat16,
        w_dtype=torch.float32,
    )
    forward: Any = recorded(_fprop, records)
    backward: Any = recorded(_dgrad_and_wgrad, records)
    for _ in range(3):
        y, saved = forward(x, w, b, None, plan)
        assert torch.equal(y, wanted[0])
        if columnwise is None:
            assert saved is None
            continue
        assert saved.format is columnwise
        assert_same_bytes(saved.data, x_col.data)
        assert_same_bytes(saved.scale, x_col.scale)
        grads = backward(grad, saved, w_col, None, plan)
        assert torch.equal(grads[0], wanted[1])
        assert torch.equal(grads[1], wanted[2])
