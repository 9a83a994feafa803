"""The loss of logits and its gradient by Triton kernels, interpreted on the CPU: float64's."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.interpreter import interpreted
from tests.support.models import randn
from tests.support.numeric import DTYPES


def check(
    logits: Tensor,
    target: Tensor,
    total: Tensor | None,
    ignored: int = -100,
    weight: Tensor | None = None,
    smoothing: float = 0.0,
) -> None:
    from blocktensor.ops.cross_entropy import triton_rows

    leaf = logits.double().requires_grad_()
    options: dict[str, Any] = {"ignore_index": ignored, "label_smoothing": smoothing}
    doubled = None if weight is None else weight.double()
    want = F.cross_entropy(leaf, target, doubled, reduction="sum", **options)
    want = want if total is None else want / total
    (gradient,) = torch.autograd.grad(want, leaf)
    given = torch.full((len(logits), logits.shape[1] + 8), 7.0, dtype=logits.dtype)
    rows = given[:, : logits.shape[1]].copy_(logits)  # rows apart
    made = triton_rows.loss_and_gradient_(rows, target, total, ignored, weight, smoothing)
    torch.testing.assert_close(made.double(), want.detach(), rtol=2e-6, atol=1e-6)
    steps = max(torch.finfo(logits.dtype).eps, 1e-6)
    assert float((rows.double() - gradient).abs().max()) <= steps * float(gradient.abs().max())
    assert (given[:, logits.shape[1] :] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_loss_and_gradient(dtype: torch.dtype) -> None:
    for shape in ((1, 1), (7, 129), (4, 8193), (2, 20000)):
        logits = 4 * randn(*shape, dtype=dtype)
        logits[0, -1] = 30
        target = torch.arange(len(logits)) % shape[1]
        target[1::7] = -100
        for total in (None, torch.tensor(3.5), (target != -100).sum()):
            check(logits, target, total)
        check(logits, target.clamp(min=0), None, ignored=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@interpreted
def test_class_weights_and_label_smoothing(weighted: bool, smoothing: float) -> None:
    for shape in ((2, 1), (7, 129), (4, 8193)):
        logits = 4 * randn(*shape)
        target = torch.arange(len(logits)) % shape[1]
        target[1::7] = -100
        weight = torch.arange(shape[1]) % 5 / 2 if weighted else None  # some are 0
        for total in (None, torch.tensor(3.5)):
            check(logits, target, total, -100, weight, smoothing)


@interpreted
def test_label_smoothing_of_infinite_logits() -> None:
    logits = randn(3, 9000)
    logits[:, 7] = -math.inf
    for weight in (None, torch.ones(9000)):
        check(logits, torch.tensor([5, 0, -100]), None, -100, weight, 0.1)


@interpreted
def test_more_rows_than_one_tile_of_losses() -> None:
    from blocktensor.ops.cross_entropy import triton_rows

    with mock.patch.object(triton_rows, "_ROWS", 8):
        check(randn(20, 3), torch.arange(20) % 3, torch.tensor(20))


@interpreted
def test_large_and_infinite_logits() -> None:
    logits = 1e4 * randn(6, 9000, dtype=torch.bfloat16)
    logits[1] = -1e4
    logits[2, ::2] = -math.inf
    logits[2, :8192] = -math.inf  # a whole first tile
    logits[3, 7] = 3e38
    check(logits, torch.tensor([5, 0, 8999, 7, 299, 1]), None)


@interpreted
def test_ignored_rows_and_classes_that_do_not_exist() -> None:
    from blocktensor.ops.cross_entropy import triton_rows

    for wrong in (9000, -1, 2**40):
        logits = randn(3, 9000)
        logits[2] = math.nan
        loss = triton_rows.loss_and_gradient_(logits, torch.tensor([5, wrong, -100]), None, -100)
        assert loss.isnan()
        assert logits[0].isfinite().all()
        assert logits[1].isnan().all()
        assert (logits[2] == 0).all()
    for weight in (None, torch.ones(9000)):
        logits, target = randn(3, 9000), torch.tensor([5, 9000, -100])
        logits[2] = math.nan
        assert triton_rows.loss_and_gradient_(logits, target, None, -100, weight, 0.1).isnan()
        assert logits[1].isnan().all()
        assert (logits[2] == 0).all()
