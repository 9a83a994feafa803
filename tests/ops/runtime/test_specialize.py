"""Decisions made once for each kind of arguments: what makes a kind, and what is remembered."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, GROUP_STEP, Quantized
from blocktensor.ops.runtime import specialize
from blocktensor.ops.runtime.launch import watch_launches
from blocktensor.ops.runtime.specialize import (
    GEMM_VARIABLE,
    Recorded,
    Specialized,
    forced_gemm,
    recorded,
)
from tests.support.models import Trace


class Counted:
    """An op ``x * factor`` whose decisions are counted."""

    def __init__(self) -> None:
        self.decided: list[Any] = []
        self.table = Specialized(self._decide)

    def _decide(self, x: Tensor, factor: int) -> Callable[..., Tensor]:
        if factor == 0:
            raise ValueError("factor 0")
        self.decided.append((tuple(x.shape), factor))
        return self._scaled

    def _scaled(self, x: Tensor, factor: int) -> Tensor:
        if factor < 0:
            raise ValueError("negative")
        return x * factor


def test_each_kind_is_decided_once_until_it_is_forgotten() -> None:
    op = Counted()
    for _ in range(3):
        for size, factor in product((2, 3), (4, 5)):
            x = torch.rand(size)
            for run in (op.table, op.table.run):
                assert torch.equal(run(x, factor), x * factor)
    assert op.decided == [((2,), 4), ((2,), 5), ((3,), 4), ((3,), 5)]
    assert len(op.table) == 4
    op.table.forget()
    assert len(op.table) == 0
    op.table(x, factor)
    assert len(op.decided) == 5


def values_in_memory(x: Tensor, offs: Any) -> Tensor:
    """As a kernel reads them."""
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return memory.as_strided(x.shape, x.stride(), x.storage_offset()).clone()


@pytest.mark.parametrize("offs", [None, torch.tensor([2], dtype=torch.int32)])
def test_functions_get_memory_that_has_the_values(offs: Tensor | None) -> None:
    """PyTorch negates the imaginary part of a conjugate later: its memory has the other sign."""
    z = torch.randn(2, 3, dtype=torch.complex64)
    x, negated = z.imag, z.conj().imag
    assert negated.is_neg() and torch.equal(values_in_memory(negated, None), x)
    table = Specialized(lambda *_: values_in_memory)
    for each in (x, negated, x, negated):  # a decision is known from the second time on
        assert torch.equal(table(each, offs), each)


def test_numbers_of_rows_in_groups_are_told_apart_by_steps() -> None:
    key, ends = specialize.key_of, torch.zeros(3, dtype=torch.int32)
    step = GROUP_STEP + 300
    x, one_more, more = (torch.rand(rows, 8) for rows in (300, 301, step))
    assert key((x, ends)) == key((one_more, ends)) != key((more, ends))
    assert key((x, x, ends)) == key((one_more, one_more, ends)) != key((x, one_more, ends))
    assert key((x, x)) != key((one_more, one_more))  # of no groups
    form = Quantized(x, x, BLOCKS_1X128)
    assert key((form, ends, 300)) == key((form, ends, 301)) != key((form, ends, step))
    # a cast has its own rows, whole steps of them; so has a matrix with a row for each group
    other = Quantized(one_more, one_more, BLOCKS_1X128)
    bias = torch.rand(3, 8)
    assert key((x, form, ends)) != key((one_more, other, ends))
    assert key((x, form, ends)) == key((one_more, form, ends))
    assert key((x, bias, ends)) == key((one_more, bias, ends)) != key((x, bias[:2], ends))
    assert key((x, ends, (form, None))) != key((x, ends, (other, None)))
    assert key((x, ends, 5)) != key((x, ends, 6))
    assert key((x, ends)) != key((x, ends[:2]))


def test_a_sequence_has_a_decision_for_each_kind_of_all_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decided: list[Any] = []

    def decide(function: Callable[..., Any]) -> Callable[..., Any]:
        decided.append(function)
        return function

    monkeypatch.setattr(specialize, "recorded", decide)
    run = specialize.sequence()(lambda x, form, factors: x.sum())
    x, y = torch.rand(4, 4), torch.rand(9)
    form = Quantized(x, y[:8], BLOCKS_1X128)
    calls = [
        (x, form, (True, False)),
        (x, form, (True, True)),
        (x.t(), form, (True, False)),
        (x, form._replace(scale=y[1:]), (True, False)),
        (x, form._replace(scale=y[::2]), (True, False)),
        (x, form._replace(data=x.t()), (True, False)),
        (x, form._replace(format=BLOCKS_128X128), (True, False)),
        (x, None, (True, False)),
    ]
    for _ in range(2):
        for call in calls:
            run(*call)
        assert len(decided) == len(calls)
    monkeypatch.setenv(GEMM_VARIABLE, "reference")
    run(*calls[0])
    assert len(decided) == len(calls) + 1


def test_a_sequence_that_is_watched_or_dispatched_runs_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(specialize, "recorded", lambda function: lambda x: (function(x),))
    run, x = specialize.sequence()(lambda x: x * 2), torch.rand(2)
    with specialize.watching(lambda *_: None):
        assert torch.equal(run(x), x * 2)
    with Trace():
        assert torch.equal(run(x), x * 2)
    assert run(x.to("meta")).is_meta
    assert isinstance(run(x), tuple)


@pytest.mark.parametrize("count", [1, 2])
def test_rows_in_groups_that_lie_otherwise_are_told_apart(count: int) -> None:
    """Columns, strides, alignment, dtype and device of all tensors count, and other arguments."""
    memory, ends = torch.rand(300 * 16 + 4), torch.zeros(3, dtype=torch.int32)
    x, *others = (memory[start : start + 300 * 8].view(300, 8) for start in (0, 1, 2))
    others += [x[:, :4], memory[: 300 * 16].view(300, 16)[:, :8], x.half(), x.to("meta")]

    def key(one: Tensor, of: Tensor = ends, *more: Any) -> Any:
        return specialize.key_of((x, one, of, *more) if count == 2 else (one, of, *more))

    more_ends = torch.zeros(4, dtype=torch.int32)
    ends_too = more_ends, more_ends[1:]
    keys = [key(x), *map(key, others), *(key(x, each) for each in ends_too), key(x, ends, 3)]
    assert len(set(keys)) == len(keys)
    assert key(x) == key(x.clone(), ends.clone())


@pytest.mark.parametrize(("factor", "said", "decided"), [(0, "factor 0", 0), (-1, "negative", 1)])
def test_only_an_error_of_the_decision_makes_a_new_one(
    factor: int, said: str, decided: int
) -> None:
    op = Counted()
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            op.table(torch.rand(2), factor)
    assert len(op.decided) == len(op.table) == decided


def test_the_oldest_kind_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialize, "MAX_KEYS", 3)
    op = Counted()
    for size in (1, 2, 3, 4, 4, 3, 2, 1):
        op.table(torch.rand(size), 2)
    assert [shape for (shape,), _ in op.decided] == [1, 2, 3, 4, 1]
    assert len(op.table) == 3


def test_the_forced_backend_is_part_of_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GEMM_VARIABLE, raising=False)
    op, x = Counted(), torch.rand(2)
    for names in (["triton", "reference"], ["reference", "triton"]):
        op.table(x, 3)
        for name in names:
            monkeypatch.setenv(GEMM_VARIABLE, name)
            assert forced_gemm() == name
            op.table(x, 3)
        monkeypatch.delenv(GEMM_VARIABLE)
        assert forced_gemm() is None
    assert len(op.decided) == len(op.table) == 3


def test_only_functions_that_launch_are_recorded() -> None:
    pytest.importorskip("triton")
    assert recorded(abs, launches=False) is abs
    assert isinstance(recorded(abs), Recorded)


def test_calls_that_must_are_dispatched() -> None:
    dispatched: list[tuple[Any, ...]] = []
    op, x = Counted(), torch.rand(2)
    table = Specialized(op._decide, lambda *args: dispatched.append(args))
    table(nn.Parameter(x), 3)
    assert (dispatched, len(op.decided)) == ([], 1)
    for call in ((x.to("meta"), 3), (Quantized(x.to("meta"), x, BLOCKS_1X128), 4)):
        assert table(*call) is None
        assert dispatched.pop() is not None
    with Trace():
        table(x, 3)
        assert dispatched == [(x, 3)]
        assert torch.equal(table.run(x, 3), x * 3)  # as within the registered op
        assert torch.equal(op.table(x, 3), x * 3)  # without a dispatch it runs in any case
    assert len(op.decided) == 2
    assert op.table(x.to("meta"), 3).is_meta


def test_a_part_of_a_recording_is_not_dispatched_and_not_remembered() -> None:
    """Its launches belong to what is being recorded, under a dispatch mode."""
    dispatched: list[Any] = []
    op, x = Counted(), torch.rand(2)
    table = Specialized(op._decide, dispatched.append)
    with Trace(), watch_launches():
        for run in (table, table.run) * 2:
            assert torch.equal(run(x, 3), x * 3)
    assert (len(op.decided), len(table), dispatched) == (4, 0, [])


def test_keys_look_into_casts_and_keep_other_arguments() -> None:
    x, y = torch.rand(2, 3), torch.rand(3)
    assert kinds((x, 3), (torch.rand(2, 3), 3)) == 1
    parts = torch.rand(7)[1:].view(2, 3), x.half(), x.to("meta"), x.t().contiguous().t(), x[:, :2]
    assert kinds((x, 3), (x, 4), (x,), (x, None), *((part, 3) for part in parts)) == 9
    q = Quantized(x, y, BLOCKS_1X128)
    assert kinds((q, 3), (Quantized(x.clone(), y.clone(), BLOCKS_1X128), 3)) == 1
    scales = y.double(), torch.rand(4)[1:], torch.rand(6)[::2], y.to("meta")
    different = [
        (q,),
        (q, None),
        (q._replace(format=BLOCKS_128X128),),
        *[(q._replace(scale=each),) for each in scales],
        *[(q._replace(data=each),) for each in (*parts, x.view(3, 2))],
        *[(q, BLOCKS_1X128, *each) for each in ((0, 0), (1, 0), (0, 1))],
        (q, BLOCKS_128X128, 0, 0),
    ]
    assert kinds(*different) == len(different)


def kinds(*calls: tuple[Any, ...]) -> int:
    return len({specialize.key_of(call) for call in calls})
