"""The loss of logits, and its gradient in their place: torch's, up to the order of fp32 sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from blocktensor.ops.cross_entropy import ops
from blocktensor.ops.runtime import build_player
from tests.support.models import randn
from tests.support.numeric import DTYPES, relative_error, to_device

SHAPES = [(1, 1), (1, 2), (3, 127), (5, 128), (7, 129), (130, 1000)]
SHAPES += [(9, 8192), (4, 8193), (3, 20000)]
ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}


def classes(rows: int, n: int, ignored: int = -100) -> Tensor:
    made = torch.randint(0, n, (rows,), generator=Generator().manual_seed(1))
    made[1::7] = ignored
    return made


def loss_of(
    logits: Tensor,
    target: Tensor,
    total: Tensor | None = None,
    ignored: int = -100,
    weight: Tensor | None = None,
    smoothing: float = 0.0,
) -> Tensor:
    """The loss; ``logits`` become its gradient."""
    return ops.loss_and_gradient_(logits, target, total, ignored, weight, smoothing)


def by_torch(logits: Tensor, target: Tensor, total: Tensor | None, **options: Any) -> list[Tensor]:
    """The loss and its gradient, in float64 from the logits as they are."""
    leaf = logits.double().requires_grad_()
    loss = F.cross_entropy(leaf, target, reduction="sum", **options)
    loss = loss if total is None else loss / total
    loss.backward()
    assert leaf.grad is not None
    return [loss.detach(), leaf.grad]


def check(
    logits: Tensor,
    target: Tensor,
    total: Tensor | None,
    ignored: int = -100,
    weight: Tensor | None = None,
    smoothing: float = 0.0,
) -> None:
    doubled = None if weight is None else weight.double()
    options: dict[str, Any] = {"ignore_index": ignored, "label_smoothing": smoothing}
    want = by_torch(logits, target, total, weight=doubled, **options)
    given = logits.clone()
    loss = loss_of(given, target, total, ignored, weight, smoothing)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss.double(), want[0], rtol=2e-6, atol=1e-6)
    largest = float(want[1].abs().max())
    tolerance = ULP[logits.dtype] * largest + 2**-25
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # torch adds a row's exponentials one after the other in each lane of a vector register,
        # whose width depends on the machine: an error that grows like a random walk
        tolerance += math.sqrt(logits.shape[1]) * 2**-24 * largest  # 2**-24: of one sum
    assert float((given.double() - want[1]).abs().max()) <= tolerance


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_gradient(dtype: torch.dtype, shape: Any, device: torch.device) -> None:
    logits = to_device(4 * randn(*shape, dtype=dtype), device)
    target = classes(*shape).to(device)
    for total in (None, (target != -100).sum(), torch.tensor(3.5, device=device)):
        check(logits, target, total)
    check(logits, classes(*shape, ignored=0).to(device), None, ignored=0)


@pytest.mark.parametrize("shape", [(2, 1), (7, 129), (4, 8193)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_class_weights_and_label_smoothing(
    weighted: bool, smoothing: float, dtype: torch.dtype, shape: Any, device: torch.device
) -> None:
    logits = to_device(4 * randn(*shape, dtype=dtype), device)
    target = classes(*shape).to(device)
    weight = torch.arange(shape[1], device=device) % 5 / 2 if weighted else None  # some are 0
    for total in (None, torch.tensor(3.5, device=device)):
        check(logits, target, total, -100, weight, smoothing)


def test_label_smoothing_of_an_infinite_logit_is_infinite(device: torch.device) -> None:
    logits = to_device(randn(3, 300), device)
    logits[1, 7] = -math.inf
    for weight in (None, torch.ones(300, device=device)):
        check(logits, torch.tensor([5, 0, 3], device=device), None, -100, weight, 0.1)


def test_large_and_infinite_logits(device: torch.device) -> None:
    logits = 1e4 * randn(6, 300, dtype=torch.bfloat16)
    logits[1] = -1e4
    logits[2, ::2] = -math.inf
    logits[3, 7] = 3e38
    check(to_device(logits, device), torch.tensor([5, 0, 3, 7, 299, 1]).to(device), None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_reach_the_loss_and_their_row_alone(bad: float, device: torch.device) -> None:
    logits = to_device(randn(3, 200, dtype=torch.bfloat16), device)
    logits[1, 13] = bad
    assert loss_of(logits, torch.tensor([5, 0, 3], device=device)).isnan()
    assert logits[1].isnan().any()
    assert logits[[0, 2]].isfinite().all()


def test_a_row_is_ignored_whatever_is_in_it(device: torch.device) -> None:
    logits = to_device(randn(3, 9000, dtype=torch.bfloat16), device)
    target = torch.tensor([5, -100, 3], device=device)
    for smoothing in (0.0, 0.1):
        loss = loss_of(logits.clone(), target, smoothing=smoothing)
        for filled in (3.0, math.nan, math.inf, -math.inf):
            given = logits.clone()
            given[1] = filled
            assert torch.equal(loss_of(given, target, smoothing=smoothing), loss)
            assert (given[1] == 0).all()
            assert given[[0, 2]].isfinite().all()


@pytest.mark.parametrize("rows", [0, 3])
def test_no_rows_count(rows: int, device: torch.device) -> None:
    logits = to_device(randn(rows, 200), device)
    target = torch.full((rows,), -100, device=device)
    assert loss_of(logits.clone(), target, (target != -100).sum()).isnan()  # 0 / 0
    assert loss_of(logits, target) == 0
    assert (logits == 0).all()


@pytest.mark.gpu
def test_a_class_that_does_not_exist_is_nan() -> None:
    for wrong in (200, -1, 2**40):
        logits = randn(3, 200, device="cuda")
        target = torch.tensor([5, wrong, 3], device="cuda")
        for options in ({}, {"smoothing": 0.1}, {"weight": torch.ones(200, device="cuda")}):
            given = logits.clone()
            assert loss_of(given, target, **options).isnan()
            assert given[1].isnan().all()
            assert given[[0, 2]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_kernel_is_deterministic_and_recorded(weighted: bool, smoothing: float) -> None:
    logits, target = randn(700, 5000, device="cuda"), classes(700, 5000).cuda()
    options: dict[str, Any] = {"smoothing": smoothing}
    if weighted:
        options["weight"] = torch.arange(5000, device="cuda") % 5 / 2
    first = logits.clone()
    loss = loss_of(first, target, **options)
    player = build_player.player()
    assert player is not None
    plays = player.plays()
    for _ in range(5):
        given = logits.clone()
        assert torch.equal(loss_of(given, target, **options), loss)
        assert torch.equal(given, first)
    assert player.plays() >= plays + 5
    rows = torch.empty(700, 5008, dtype=torch.bfloat16, device="cuda").fill_(7)
    rows[:, :5000] = logits
    made = loss_of(rows[:, :5000], target, **options)
    torch.testing.assert_close(made, loss, rtol=1e-6, atol=0)
    assert relative_error(rows[:, :5000], first) <= 1e-3
    assert (rows[:, 5000:] == 7).all()


def test_more_bytes() -> None:
    assert ops.more_bytes(torch.empty(3, 4)) == 12
