"""The checking mode: what it lets pass, and what it reports.

With kernels that are Python (``tests/support/fake_driver.py``); random programs run in this mode on
a GPU (``tests/autograd/test_recorded_programs.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from blocktensor import BlockwiseFP8Weight
from blocktensor.autograd import plan as plans
from blocktensor.ops.formats import BLOCKS_1X128, Quantized
from blocktensor.ops.runtime import check_recordings
from blocktensor.ops.runtime.launch import Launch
from blocktensor.ops.runtime.record import record
from tests.support.fake_driver import (
    Kernel,
    axpy,
    axpy_body,
    draw,
    fake_driver,
    floats,
    launch,
    op,
    player,
)
from tests.support.models import complaint, randn

__all__ = ["fake_driver"]

pytestmark = pytest.mark.usefixtures("fake_driver", "checking")


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_recordings, "ENABLED", True)
    monkeypatch.setattr(check_recordings, "compared", {"recordings": 0, "plans": 0})


def test_calls_that_repeat_a_recording_of_theirs_pass() -> None:
    a = op(axpy)
    for _ in range(5):
        x, y = draw(2, 8)
        assert torch.equal(a.call(x, y, 3), 3 * x + y)
    # the first call is recorded; each other one launches plainly, too
    assert (check_recordings.compared["recordings"], a.calls, len(a.kernel.direct)) == (4, 5, 4)


def test_a_function_that_writes_to_its_argument_writes_once() -> None:
    a = op(lambda kernel, out, x: launch(kernel, x, out, out, 2))
    for _ in range(4):
        x, out = draw(2, 8)
        want = 2 * x + out
        a.call(out, x)
        assert torch.equal(out, want)
    assert check_recordings.compared["recordings"] == 3


def test_memory_that_nobody_writes_is_no_difference() -> None:
    def half(kernel: Kernel, x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty(2, len(x))
        launch(kernel, x, y, out[0], 2)
        return out

    a = op(half)
    for _ in range(4):
        x, y = draw(2, 8)
        assert torch.equal(a.call(x, y)[0], 2 * x + y)
    assert check_recordings.compared["recordings"] == 3


def test_a_leaf_that_needs_a_gradient_is_given_back_as_it_was() -> None:
    a = op(lambda kernel, out, x: launch(kernel, x, out, out, 2))
    out = draw(8).requires_grad_()
    for _ in range(3):
        x, before = draw(8), out.detach().clone()
        a.call(out, x)
        assert torch.equal(out.detach(), 2 * x + before)


def by_strides(source: int, target: int, rows: int, stride: int) -> None:
    for i in range(rows):
        floats(target, rows)[i] = floats(source, rows * stride)[i * stride]


def in_one_line(kernel: Kernel, x: Any) -> Tensor:
    x = x.data if isinstance(x, Quantized) else x
    out = torch.empty(len(x))
    Launch(kernel, (1,), (x, out, len(x), x.stride(0)), {}, {})()
    return out


def checked_recording(function: Callable[..., Any], x: Any) -> Callable[..., Any]:
    _, recording = record(function, (x,), player())
    return check_recordings.checked(function, recording)


@pytest.mark.parametrize("in_a_cast", [False, True])
def test_a_call_that_repeats_what_is_not_its_recording(in_a_cast: bool) -> None:
    """A recording that one key too coarse would find: of an input with other strides."""
    kernel = Kernel(by_strides, ["source", "target", "rows", "stride"])

    def given(x: Tensor) -> Any:
        return Quantized(x, draw(1), BLOCKS_1X128) if in_a_cast else x

    x = draw(16)
    run = checked_recording(lambda x: in_one_line(kernel, x), given(x[:8]))
    assert torch.equal(run(given(x[:8])), x[:8])
    said = complaint(RuntimeError, lambda: run(given(x[::2]))).replace("\n", " ")
    assert said.startswith("a recorded call of ")
    assert "differs from a plain one in result 0, float32 [8] strides [1]" in said
    assert "of 32 bytes; arguments float32 [8] strides [2] address % 16 =" in said
    assert "python -m blocktensor" in said


def test_another_layout_of_a_result_is_a_difference() -> None:
    def rows_of(kernel: Kernel, x: Tensor) -> Tensor:
        out = torch.empty_strided((len(x),), (x.stride(0),))
        Launch(kernel, (0,), (x, x, out, 0, 0), {"FLAG": True}, {})()
        return out

    kernel, x = Kernel(axpy_body, ["x", "y", "out", "count", "factor", "FLAG"]), draw(16)
    run = checked_recording(lambda x: rows_of(kernel, x), x[:8])
    said = complaint(RuntimeError, lambda: run(x[::2])).replace("\n", " ")
    assert "result 0: float32 [8] strides [1] address" in said
    assert "and float32 [8] strides [2] address" in said


def test_a_plan_that_is_not_its_own() -> None:
    weight = nn.Parameter(BlockwiseFP8Weight(randn(128, 128)))
    found = plans.plan_matmul(randn(4, 128), weight, None, None)
    assert plans.plan_matmul(randn(4, 128), weight, None, None) is found
    assert check_recordings.compared["plans"] == 2
    found.out_dtype = torch.float32
    said = complaint(RuntimeError, lambda: plans.plan_matmul(randn(4, 128), weight, None, None))
    plans._PLANS.forget()
    assert "in out_dtype: torch.float32, anew torch.bfloat16" in said.replace("\n", " ")
