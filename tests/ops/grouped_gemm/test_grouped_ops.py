"""What grouped ops ask their backend for and hand over, and what holds for their results.

Registered ops: test_registered_ops.py. Refusals: test_checks.py. Numbers:
test_reference_grouped.py.
"""

from __future__ import annotations

import pytest
import torch

from blocktensor.ops import reference
from blocktensor.ops.cast.ops import (
    quantize_grouped,
    quantize_grouped_columnwise,
)
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, Quantized
from blocktensor.ops.grouped_gemm import ops
from blocktensor.ops.grouped_gemm.choose_backend import GroupedProblem
from tests.support.groups import GROUPS, columnwise, ends, ranges, stack
from tests.support.models import Trace
from tests.support.numeric import assert_same, operand
from tests.support.reference_ops import Watched

N, K = 130, 200


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch, ops, "choose_grouped")


def test_a_backend_is_chosen_once_for_a_kind(watched: Watched, rng: torch.Generator) -> None:
    """By sizes that the host knows: those of groups are not among them."""
    bias = torch.randn(3, N, generator=rng).bfloat16()
    start, g, x = torch.zeros(3, N, K), *(torch.randn(60, c, generator=rng) for c in (N, K))
    for sizes in ((10, 20, 30), (0, 0, 60), (5, 5, 5)):
        offs = ends(*sizes)
        a, b = operand(60, K, 1, rng), stack(3, N, K, rng)
        want = reference.grouped_gemm(a, b, offs, bias, torch.float32)
        assert_same(ops.grouped_gemm(a, b, offs, bias, torch.float32), want)
        forms = columnwise(g, offs), columnwise(x, offs)
        dw = reference.grouped_gemm_wgrad(*forms, offs, 60, torch.float16)
        assert_same(ops.grouped_gemm_wgrad(*forms, offs, 60, torch.float16), dw)
        total = start.clone()
        reference.grouped_gemm_wgrad_add_(total, *forms, offs, 60)
        assert_same(ops.grouped_gemm_wgrad_add_(start, *forms, offs, 60), total)
    sizes_and_experts, row = (60, N, K, 3), BLOCKS_1X128
    cpu = torch.device("cpu")
    assert watched.problems == [
        GroupedProblem(
            "gemm", *sizes_and_experts, row, BLOCKS_128X128, torch.float32, cpu, torch.bfloat16
        ),
        GroupedProblem("wgrad", *sizes_and_experts, row, row, torch.float16, cpu),
        GroupedProblem(
            "wgrad", *sizes_and_experts, row, row, torch.float32, cpu, None, accumulate=True
        ),
    ]


def test_empty_products_ask_for_none(watched: Watched, rng: torch.Generator) -> None:
    offs = ends(0, 0)
    for rows, n, k in ((0, 3, 5), (3, 0, 5), (0, 0, 0)):
        a, b = operand(rows, k, 1, rng), stack(2, n, k, rng)
        assert ops.grouped_gemm(a, b, offs, None, torch.float16).shape == (rows, n)
    g, x = (columnwise(torch.zeros(0, c), offs) for c in (3, 5))
    start = torch.ones(2, 3, 5)
    assert torch.equal(ops.grouped_gemm_wgrad_add_(start, g, x, offs, 0), torch.ones(2, 3, 5))
    none = columnwise(torch.zeros(4, 0), offs)
    assert ops.grouped_gemm_wgrad(none, none, offs, 4).shape == (2, 0, 0)
    assert watched.problems == []


def test_without_tokens_the_weights_gradient_is_zero(rng: torch.Generator) -> None:
    offs = ends(0, 0)
    g, x = (columnwise(torch.zeros(0, c), offs) for c in (3, 5))
    assert_same(ops.grouped_gemm_wgrad(g, x, offs, 0), torch.zeros(2, 3, 5).bfloat16())


@pytest.mark.parametrize("groups", GROUPS)
def test_groups_do_not_depend_on_each_other(groups: str, rng: torch.Generator) -> None:
    """Experts in reverse order, with their rows, give the same bits in reverse order."""
    rows, sizes = GROUPS[groups]
    offs, flipped = ends(*sizes), ends(*sizes[::-1])
    order = torch.cat([torch.arange(rows)[s] for s in reversed(ranges(offs))])
    g, x = (torch.randn(rows, c, generator=rng) for c in (N, K))
    b = stack(len(sizes), N, K, rng)
    row, col = quantize_grouped(x, offs, BLOCKS_1X128)
    y = ops.grouped_gemm(row, b, offs)
    dw = ops.grouped_gemm_wgrad(quantize_grouped_columnwise(g, offs, BLOCKS_1X128), col, offs, rows)
    row, col = quantize_grouped(x[order], flipped, BLOCKS_1X128)
    reverse = Quantized(
        b.data.view(torch.uint8).flip(0).view(b.data.dtype), b.scale.flip(0), b.format
    )
    assert_same(ops.grouped_gemm(row, reverse, flipped), y[order])
    form = quantize_grouped_columnwise(g[order], flipped, BLOCKS_1X128)
    assert_same(ops.grouped_gemm_wgrad(form, col, flipped, len(order)), dw.flip(0))


def test_no_op_reads_the_ends_on_the_host(rng: torch.Generator) -> None:
    """Through the dispatcher, which shows every op: a read is ``_local_scalar_dense``."""
    offs, x, g = ends(10, 20), torch.randn(40, K), torch.randn(40, N)
    b, out = stack(2, N, K, rng), torch.zeros(2, N, K)
    with Trace() as trace:
        row, col = quantize_grouped(x, offs, BLOCKS_1X128)
        ops.grouped_gemm(row, b, offs)
        form = quantize_grouped_columnwise(g, offs, BLOCKS_1X128)
        ops.grouped_gemm_wgrad(form, col, offs, 40)
        ops.grouped_gemm_wgrad_add_(out, form, col, offs, 40)
    assert trace.count("blocktensor.") == 5
    assert trace.count("item") == trace.count("_local_scalar_dense") == 0
