"""The grouped dgrad as one op: the bits of the ops it is made of, and what it registers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, BLOCKS_128X128_POW2, Quantized
from blocktensor.ops.grouped_gemm.dgrad_ops import (
    grouped_dgrad_of_master,
    grouped_dgrad_of_rowwise,
)
from tests.support.groups import GROUPS, ends
from tests.support.numeric import assert_same, operand
from tests.support.reference_ops import replace_op

OPS = torch.ops.blocktensor
NAMES = ("grouped_dgrad_of_rowwise", "grouped_dgrad_of_master")
N, K = 130, 300
every_grouping = pytest.mark.parametrize("groups", GROUPS)


def operands(groups: str) -> tuple[Quantized, Tensor, Tensor]:
    """The gradient ``[T, N]`` in FP8, the stack ``[E, N, K]`` and the ends of its groups."""
    rows, sizes = GROUPS[groups]
    rng = torch.Generator().manual_seed(0)
    w = torch.randn(len(sizes), N, K, generator=rng)
    return operand(rows, N, 1, rng), w, ends(*sizes)


def samples(groups: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, tuple[Any, ...]]:
    """The arguments of the registered ops, by name."""
    g, w, offs = operands(groups)
    fp8 = reference.quantize_rowwise(w, BLOCKS_128X128_POW2)
    given, format = (g.data, g.scale, BLOCKS_1X128.name), BLOCKS_128X128_POW2.name
    return {
        NAMES[0]: (*given, fp8.data, fp8.scale, format, offs, dtype),
        NAMES[1]: (*given, w, format, offs, dtype),
    }


@every_grouping
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_the_product_with_the_columnwise_form(groups: str, dtype: torch.dtype) -> None:
    g, w, offs = operands(groups)
    for format in (BLOCKS_128X128, BLOCKS_128X128_POW2):
        fp8 = reference.quantize_rowwise(w, format)
        want = reference.grouped_gemm(g, reference.transpose(fp8), offs, None, dtype)
        assert_same(grouped_dgrad_of_rowwise(g, fp8, offs, dtype), want)
        for lies in (w, w.mT.contiguous().mT):
            assert_same(grouped_dgrad_of_master(g, lies, format, offs, dtype), want)
    for name, args in samples(groups, dtype).items():
        assert_same(getattr(OPS, name)(*args), want)


def test_a_stack_that_lies_transposed_needs_no_transpose(monkeypatch: pytest.MonkeyPatch) -> None:
    g, w, offs = operands("ragged")
    want = grouped_dgrad_of_master(g, w, BLOCKS_128X128, offs, torch.float32)
    replace_op(monkeypatch, "transpose", lambda x: pytest.fail("a transpose"))
    lies = w.mT.contiguous().mT
    assert_same(grouped_dgrad_of_master(g, lies, BLOCKS_128X128, offs, torch.float32), want)


@every_grouping
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, groups: str) -> None:
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    args = samples(groups)[name]
    passed = torch.library.opcheck(getattr(OPS, name).default, args, test_utils=checks)
    assert passed == dict.fromkeys(checks, "SUCCESS")


@pytest.mark.parametrize("name", NAMES)
def test_flops(name: str) -> None:
    with FlopCounterMode(display=False) as counter:
        getattr(OPS, name)(*samples("ragged")[name])
    assert counter.get_total_flops() == 2 * 270 * N * K  # not again for the product inside
