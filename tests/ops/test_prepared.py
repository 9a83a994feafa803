"""Ops prepared once for each kind of arguments: what makes a kind, and what is remembered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktensor.ops import library, prepared, reference
from blocktensor.ops.prepared import Prepared, prepare
from tests.numeric import operand


class Counted:
    """An op ``x * factor`` whose preparations are counted."""

    def __init__(self) -> None:
        self.prepared: list[Any] = []
        self.call = Prepared(lambda x, factor: (x.shape, factor), self._prepare)

    def _prepare(self, x: Tensor, factor: int) -> prepared.Run:
        if factor == 0:
            raise ValueError("factor 0")
        self.prepared.append((tuple(x.shape), factor))
        return lambda x, factor: x * factor


def test_each_kind_is_prepared_once() -> None:
    op = Counted()
    for _ in range(3):
        for size in (2, 3):
            for factor in (4, 5):
                x = torch.rand(size)
                assert torch.equal(op.call(x, factor), x * factor)
    assert op.prepared == [((2,), 4), ((2,), 5), ((3,), 4), ((3,), 5)]


def test_a_failed_preparation_is_not_remembered() -> None:
    op = Counted()
    for _ in range(2):
        with pytest.raises(ValueError, match="factor 0"):
            op.call(torch.rand(2), 0)
    assert op.prepared == []


def test_the_oldest_kind_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MAX_KINDS", 3)
    op = Counted()
    for size in (1, 2, 3, 4, 4, 3, 2, 1):
        op.call(torch.rand(size), 2)
    assert [shape for (shape,), _ in op.prepared] == [1, 2, 3, 4, 1]


def test_forgetting_prepares_anew() -> None:
    op = Counted()
    op.call(torch.rand(2), 3)
    op.call.forget()
    op.call(torch.rand(2), 3)
    assert len(op.prepared) == 2


def test_a_plain_function_is_looked_up_at_every_call() -> None:
    module = SimpleNamespace(f=lambda x, y, factor: x * factor)
    x = torch.rand(2)
    run = prepare(module, "f", x, None, 3)
    assert torch.equal(run(x, None, 3), x * 3)
    module.f = lambda x, y, factor: x + factor
    assert torch.equal(run(x, None, 3), x + 3)


def test_a_function_may_prepare_itself() -> None:
    def f(x: Tensor, factor: int) -> Tensor:
        raise AssertionError("the run made by f.prepare is used")

    f.prepare = lambda x, factor: lambda x: x - factor  # type: ignore[attr-defined]
    x = torch.rand(2)
    assert torch.equal(prepare(SimpleNamespace(f=f), "f", x, 3)(x), x - 3)


# The ops' own kinds


def kinds(op: Prepared, *calls: tuple[Any, ...]) -> int:
    return len({op._kind(*call) for call in calls})


X = torch.rand(8, 256, dtype=torch.bfloat16)


def test_what_tells_casts_apart() -> None:
    odd = torch.rand(8 * 256 + 1, dtype=torch.bfloat16)[1:].view(8, 256)
    different = (
        (X, False),
        (X, True),
        (odd, False),
        (X.view(4, 512), False),
        (X.t().contiguous().t(), False),
        (X.half(), False),
        (X.to("meta"), False),
    )
    for op in (library._rowwise, library._columnwise, library._both, library._square):
        assert kinds(op, *different) == len(different)
        assert kinds(op, (X, False), (X.clone(), False)) == 1


def test_what_tells_gemms_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = operand(128, 256, 1, rng), operand(128, 256, 128, rng)
    wide = torch.empty(2, 132).t()[:128].copy_(a[1])
    odd = torch.empty(128 * 2 + 1)[1:].view(2, 128).t().copy_(a[1])
    bias = torch.rand(128, dtype=torch.bfloat16)
    bf16, fp32 = torch.bfloat16, torch.float32
    calls = [
        (*a, *b, None, bf16),
        (*a, *b, None, fp32),
        (*a, *b, bias, bf16),
        (*a, *b, bias.float(), bf16),
        (*a, *b, bias.repeat(2)[::2], bf16),
        (*b, *a, None, bf16),
        (*a, *a, None, bf16),
        (a[0], wide, *b, None, bf16),
        (a[0], odd, *b, None, bf16),
        (*operand(64, 256, 1, rng), *b, None, bf16),
        (*operand(128, 512, 1, rng), *operand(128, 512, 128, rng), None, bf16),
    ]
    assert kinds(library._gemm, *calls) == len(calls)
    for call in calls:
        assert torch.equal(library._gemm(*call), reference.gemm(*call))
    before = library._gemm._kind(*calls[0])
    monkeypatch.setenv("BLOCKTENSOR_GEMM", "reference")
    assert library._gemm._kind(*calls[0]) != before
    out = torch.zeros(128, 256)
    added = [(out[:, :128], *a, *b), (out.view(2, 128, 128)[0], *a, *b), (out[:, 1:129], *a, *b)]
    assert kinds(library._gemm_add_, *added) == 3
