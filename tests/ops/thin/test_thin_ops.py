"""Thin matmuls: the specification against loops in fp64, and layouts of gradients.

Registered ops: tests/ops/test_registered_ops.py. Kernels: test_thin_kernels.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Generator

from blocktensor.ops.thin.layout import empty_gradient, order_of
from blocktensor.ops.thin.ops import thin_operand, thin_products, thin_rows
from tests.support.groups import GROUPS, ends, ranges
from tests.support.models import Trace
from tests.support.numeric import assert_same

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
C = 200
every_grouping = pytest.mark.parametrize("groups", GROUPS)


def test_an_operand_is_rounded_and_padded_to_whole_vectors(rng: Generator) -> None:
    w = torch.randn(3, 5, C, generator=rng).transpose(1, 2)
    made = thin_operand(w, BF16)
    assert (made.shape, made.dtype, made.is_contiguous()) == ((3, C, 8), BF16, True)
    assert_same(made[..., :5], w.bfloat16())
    assert not made[..., 5:].any()


@every_grouping
@pytest.mark.parametrize("scaling", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rows_are_rounded_once(
    groups: str, scaling: float, dtype: torch.dtype, rng: Generator
) -> None:
    """The fp32 sum times the scaling in fp32. Rows of no group hold NaN."""
    rows, sizes = GROUPS[groups]
    offs = ends(*sizes)
    x = torch.randn(rows, C, generator=rng).to(dtype)
    x[sum(sizes) :] = float("nan")
    thin = torch.randn(len(sizes), C, 8, generator=rng).to(dtype)
    u = thin_rows(x, thin, offs, scaling)
    want = torch.zeros(rows, 8, dtype=FP32)
    for e, inside in enumerate(ranges(offs)):
        want[inside] = (x[inside].double() @ thin[e].double()).float()
    assert_same(u, (want * torch.tensor(scaling)).to(dtype))


@every_grouping
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_products_contract_the_rows_of_each_group(
    groups: str, dtype: torch.dtype, rng: Generator
) -> None:
    rows, sizes = GROUPS[groups]
    offs = ends(*sizes)
    wide, thin = (torch.randn(rows, c, generator=rng).bfloat16() for c in (C, 8))
    wide[sum(sizes) :] = float("nan")
    made = thin_products(wide, thin, offs, 5, dtype, "ecr")
    for e, inside in enumerate(ranges(offs)):
        assert_same(made[e], (wide[inside].double().T @ thin[inside, :5].double()).to(dtype))


@pytest.mark.parametrize("order", ["".join(each) for each in itertools.permutations("ecr")])
def test_gradients_lie_in_memory_as_asked(order: str) -> None:
    wide, offs = torch.zeros(4, 7), ends(1, 1, 2)
    made = empty_gradient(wide, offs, 5, FP32, order)
    assert made.shape == (3, 7, 5)
    assert order_of(made.stride()) == order
    assert made.permute(["ecr".index(name) for name in order]).is_contiguous()


def test_what_does_not_fit_together_is_refused(rng: Generator) -> None:
    x, thin, offs = torch.zeros(4, C, dtype=BF16), torch.zeros(2, C, 8, dtype=BF16), ends(2, 2)
    u = torch.zeros(4, 8, dtype=BF16)
    for call in (
        lambda: thin_operand(torch.zeros(3, 4), BF16),
        lambda: thin_operand(thin, FP32),
        lambda: thin_rows(x.float(), thin.float(), offs, 1.0),
        lambda: thin_rows(x, thin.half(), offs, 1.0),
        lambda: thin_rows(x, thin[:1], offs, 1.0),
        lambda: thin_rows(x, thin.mT.contiguous().mT, offs, 1.0),
        lambda: thin_products(x, u[:3], offs, 8, FP32, "ecr"),
        lambda: thin_products(x, u, offs, 9, FP32, "ecr"),
        lambda: thin_products(x, u, offs, 8, FP32, "erc "),
    ):
        with pytest.raises(ValueError, match="do not fit together"):
            call()


def test_no_op_reads_the_ends_on_the_host() -> None:
    x, thin, offs = torch.zeros(4, C, dtype=BF16), torch.zeros(2, C, 8, dtype=BF16), ends(2, 2)
    with Trace() as trace:
        thin_products(x, thin_rows(x, thin, offs, 2.0), offs, 8, FP32, "ecr")
    assert trace.count("blocktensor.") == 2
    assert trace.count("item") == trace.count("_local_scalar_dense") == 0
