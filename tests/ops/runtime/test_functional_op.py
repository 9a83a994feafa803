"""Ops that are registered with the dispatcher by their schema."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from blocktensor.ops.runtime.functional_op import fake_of, functional_op
from tests.support.numeric import assert_same


@functional_op("_test_scaled")
def scaled(x: Tensor, by: float, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    return (x * by).to(dtype or x.dtype), x.new_zeros(2)


@functional_op("_test_sum", schema="(Tensor[] parts) -> Tensor")
def _sum(*args: list[Tensor]) -> Tensor:
    (parts,) = args
    return sum(parts, parts[0].new_zeros(()))


@fake_of(scaled)
def _(x: Tensor, by: float, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=dtype), x.new_empty(2)


@fake_of(_sum)
def _(parts: list[Tensor]) -> Tensor:
    return torch.empty_like(parts[0])


def test_schemas() -> None:
    assert str(scaled._schema) == (
        "blocktensor::_test_scaled(Tensor x, float by, ScalarType? dtype=None) -> (Tensor, Tensor)"
    )
    assert str(_sum._schema) == "blocktensor::_test_sum(Tensor[] parts) -> Tensor"


def test_the_dispatcher_calls_the_function() -> None:
    x = torch.randn(3)
    made, zeros = scaled(x, 2.0)
    assert_same(made, x * 2)
    assert_same(zeros, torch.zeros(2))
    assert scaled(x, by=2.0, dtype=torch.float64)[0].dtype == torch.float64
    assert_same(_sum([x, x]), x + x)
    for op, args in ((scaled, (x, 2.0)), (_sum, ([x, x],))):
        passed = torch.library.opcheck(op, args)
        assert set(passed.values()) == {"SUCCESS"}


def test_fakes_and_graphs() -> None:
    with FakeTensorMode():
        assert scaled(torch.empty(5), 2.0, torch.float16)[0].dtype == torch.float16

    def run(x: Tensor) -> Tensor:
        return _sum([scaled(x, 3.0)[0], x])

    x = torch.randn(4)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same(compiled(x), run(x))


def test_no_gradient_is_lost_in_silence() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        scaled(x, 2.0)[0].sum().backward()


def test_a_second_definition_takes_the_place_of_the_first() -> None:
    """As when a module is reloaded, or imported again after it left ``sys.modules``."""
    x = torch.ones(3)
    for by in (2.0, 3.0):

        @functional_op("_test_twice")
        def multiplied(x: Tensor, by: float = by) -> Tensor:
            return x * by

        @fake_of(multiplied)
        def _(x: Tensor, by: float = 0.0) -> Tensor:
            return torch.empty_like(x)

        compiled = torch.compile(multiplied, fullgraph=True, backend="aot_eager")
        for made in (multiplied(x), compiled(x), torch.ops.blocktensor._test_twice(x)):
            assert_same(made, x * by)
