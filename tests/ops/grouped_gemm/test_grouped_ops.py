"""What grouped ops ask their backend for, and their reference against loops over groups.

Registered ops: test_registered_ops.py. Refusals: test_checks.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from blocktensor.ops import formats, reference
from blocktensor.ops.cast.ops import quantize_grouped
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, KERNEL_FORMATS, BlockFormat
from blocktensor.ops.grouped_gemm import ops
from blocktensor.ops.grouped_gemm.choose_backend import GroupedProblem
from tests.support import numeric
from tests.support.backends import Watched
from tests.support.groups import GROUPS, columnwise, ends, ranges, stack
from tests.support.models import Trace
from tests.support.numeric import DTYPES, E4M3, assert_same, expand, operand, relative_error, values

N, K = 130, 200


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch, ops, "choose_grouped")


def test_a_backend_is_chosen_once_for_a_kind(watched: Watched, rng: Generator) -> None:
    """By sizes that the host knows: those of groups are not among them."""
    bias = torch.randn(3, N, generator=rng).bfloat16()
    g, x = (torch.randn(60, c, generator=rng) for c in (N, K))
    for sizes in ((10, 20, 30), (0, 0, 60), (5, 5, 5)):
        offs = ends(*sizes)
        a, b = operand(60, K, 1, rng), stack(3, N, K, rng)
        want = reference.grouped_gemm(a, b, offs, bias, torch.float32)
        assert_same(ops.grouped_gemm(a, b, offs, bias, torch.float32), want)
        forms = columnwise(g, offs), columnwise(x, offs)
        dw = reference.grouped_gemm_wgrad(*forms, offs, 60, torch.float16)
        assert_same(ops.grouped_gemm_wgrad(*forms, offs, 60, torch.float16), dw)
    sizes_and_experts, row = (N, K, 3), BLOCKS_1X128
    cpu = torch.device("cpu")
    assert watched.problems == [
        GroupedProblem(
            "gemm", 64, *sizes_and_experts, row, BLOCKS_128X128, torch.float32, cpu, torch.bfloat16
        ),
        GroupedProblem(
            "wgrad", formats.GROUP_STEP, *sizes_and_experts, row, row, torch.float16, cpu
        ),
    ]


def test_empty_products_ask_for_none(watched: Watched, rng: Generator) -> None:
    offs = ends(0, 0)
    for rows, n, k in ((0, 3, 5), (3, 0, 5), (0, 0, 0)):
        a, b = operand(rows, k, 1, rng), stack(2, n, k, rng)
        assert ops.grouped_gemm(a, b, offs, None, torch.float16).shape == (rows, n)
    g, x = (columnwise(torch.zeros(0, c), offs) for c in (3, 5))
    assert_same(ops.grouped_gemm_wgrad(g, x, offs, 0), torch.zeros(2, 3, 5).bfloat16())
    none = columnwise(torch.zeros(4, 0), offs)
    assert ops.grouped_gemm_wgrad(none, none, offs, 4).shape == (2, 0, 0)
    assert watched.problems == []


def test_no_op_reads_the_ends_on_the_host(rng: Generator) -> None:
    """Through the dispatcher, which shows every op: a read is ``_local_scalar_dense``."""
    offs, x, g = ends(10, 20), torch.randn(40, K), torch.randn(40, N)
    b = stack(2, N, K, rng)
    with Trace() as trace:
        row, col = quantize_grouped(x, offs, BLOCKS_1X128, BLOCKS_1X128)
        ops.grouped_gemm(row, b, offs)
        _, form = quantize_grouped(g, offs, None, BLOCKS_1X128)
        ops.grouped_gemm_wgrad(form, col, offs, 40)
    assert trace.count("blocktensor.") == 4
    assert trace.count("item") == trace.count("_local_scalar_dense") == 0


every_grouping = pytest.mark.parametrize("groups", GROUPS)


def check_columnwise(x: Tensor, offs: Tensor, got: formats.Quantized) -> None:
    """Each group's blocks are the oracle's cast of its transpose, followed by zeros.

    After a NaN, zeros divided by the scale of its block are NaN too.
    """
    rows, k = x.shape
    assert got.data.shape == (k, 128 * formats.group_blocks(rows, len(offs)))
    assert got.data.is_contiguous()
    first = 0
    for inside in ranges(offs):
        group = x[inside].t()
        count = -(-group.shape[1] // 128)
        data, scale = numeric.cast_by_blocks(
            group, got.format.block_shape, got.format.scale_rounding
        )
        of_group = got.data[:, 128 * first :][:, : 128 * count]
        assert_same(of_group[:, : group.shape[1]], torch.from_numpy(data).view(E4M3))
        tail = of_group[:, group.shape[1] :]
        if tail.numel():
            last = torch.from_numpy(scale[:, -1:])
            has_nan = last.repeat_interleave(got.format.rows, 0)[:k, 0].isnan()
            assert not tail[~has_nan].view(torch.uint8).any()
        assert_same(got.scale[:, first : first + count], torch.from_numpy(scale))
        first += count


@every_grouping
@pytest.mark.parametrize("format", KERNEL_FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("kind", numeric.KINDS)
def test_columnwise_blocks_begin_anew_in_every_group(
    groups: str, kind: str, format: BlockFormat, rng: Generator
) -> None:
    (rows, sizes), dtype = GROUPS[groups], DTYPES[numeric.KINDS.index(kind) % 3]
    x, offs = values(kind, rows, 130, dtype, rng), ends(*sizes)
    check_columnwise(x, offs, columnwise(x, offs, format))


def test_ends_that_are_out_of_order_or_of_range_are_moved() -> None:
    offs = torch.tensor([3, 1, -4, 9, 12], dtype=torch.int32)
    assert reference.group_ranges(offs, 10) == [(0, 3), (3, 3), (3, 3), (3, 9), (9, 10)]


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (128, 1), (129, 2), (300, 5), (7, 7)])
def test_the_bound_on_blocks_is_reached(rows: int, groups: int) -> None:
    whole = formats.group_rows(rows)
    assert rows <= whole == formats.group_rows(whole) < rows + formats.GROUP_STEP
    sizes = [1] * (groups - 1) + [whole - groups + 1]
    assert formats.group_blocks(rows, groups) == sum(-(-size // 128) for size in sizes)


@every_grouping
@pytest.mark.parametrize("bias", [False, True])
def test_a_group_is_multiplied_by_its_expert(groups: str, bias: bool, rng: Generator) -> None:
    rows, sizes = GROUPS[groups]
    a, b, offs = operand(rows, K, 1, rng), stack(len(sizes), N, K, rng), ends(*sizes)
    added = torch.randn(len(sizes), N, generator=rng) if bias else None
    out = reference.grouped_gemm(a, b, offs, added, torch.float32)
    assert (out.shape, out.dtype) == ((rows, N), torch.float32)
    wide = expand(a)
    for e, inside in enumerate(ranges(offs)):
        want = wide[inside] @ expand(formats.Quantized(b.data[e], b.scale[e], b.format)).T
        want += 0 if added is None else added[e].double()
        assert relative_error(out[inside], want) <= 1e-6
    assert not out[sum(sizes) :].any()


@every_grouping
@pytest.mark.parametrize("bias", [False, True])
def test_a_low_rank_product_is_rounded_with_the_sum(
    groups: str, bias: bool, rng: Generator
) -> None:
    """Once: fp8 sum, then the product in fp32, then the bias. Rows of no group hold NaN."""
    rows, sizes = GROUPS[groups]
    experts, offs = len(sizes), ends(*sizes)
    a, b = operand(rows, K, 1, rng), stack(experts, N, K, rng)
    left, right = (torch.randn(*s, 16, generator=rng).bfloat16() for s in ((rows,), (experts, N)))
    left[sum(sizes) :] = float("nan")
    added = torch.randn(experts, N, generator=rng) if bias else None
    made = ops.grouped_gemm(a, b, offs, added, torch.bfloat16, rows, left, right)
    want = reference.grouped_gemm(a, b, offs, None, torch.float32)
    for e, inside in enumerate(ranges(offs)):
        want[inside] += (left[inside].double() @ right[e].double().T).float()
        want[inside] += 0 if added is None else added[e]
    assert_same(made, want.bfloat16())


def test_low_rank_products_that_kernels_cannot_add_are_refused(rng: Generator) -> None:
    rows, offs = 20, ends(5, 15)
    a, b = operand(rows, K, 1, rng), stack(2, N, K, rng)
    bf16, fp16 = torch.bfloat16, torch.float16
    left, right = torch.zeros(rows, 16, dtype=bf16), torch.zeros(2, N, 16, dtype=bf16)
    for wrong in (
        (left, None),
        (left[:, :12].contiguous(), right[..., :12].contiguous()),
        (left[:-1], right),
        (left, right[:1]),
        (left, right.mT.contiguous().mT),
        (left.to(fp16), right.to(fp16)),
        (torch.zeros(rows, 72, dtype=bf16), torch.zeros(2, N, 72, dtype=bf16)),
    ):
        with pytest.raises(ValueError, match="do not fit together"):
            ops.grouped_gemm(a, b, offs, None, bf16, rows, *wrong)


@every_grouping
@pytest.mark.parametrize("format", [BLOCKS_1X128, BLOCKS_128X128], ids=lambda f: f.name)
def test_wgrad_contracts_the_tokens_of_each_group(
    groups: str, format: BlockFormat, rng: Generator
) -> None:
    rows, sizes = GROUPS[groups]
    offs = ends(*sizes)
    g, x = (values("normal", rows, c, torch.bfloat16, rng) for c in (N, K))
    a, b = columnwise(g, offs), columnwise(x, offs, format)
    out = reference.grouped_gemm_wgrad(a, b, offs, rows, torch.float32)
    for e, inside in enumerate(ranges(offs)):
        exact = g[inside].double().T @ x[inside].double()
        assert relative_error(out[e], exact) <= 0.06
        forms = ((g, BLOCKS_1X128), (x, format))
        parts = [expand(reference.quantize_columnwise(t[inside], f)) for t, f in forms]
        assert relative_error(out[e], parts[0] @ parts[1].T) <= 1e-6
    empty = [e for e, size in enumerate(sizes) if size == 0]
    assert not out[empty].any()


def test_bad_rows_of_no_group_reach_nothing(rng: Generator) -> None:
    rows, sizes = GROUPS["rows of no group"]
    offs, inside = ends(*sizes), slice(0, sum(sizes))
    g, x = (values("normal", rows, c, torch.bfloat16, rng) for c in (N, K))
    b = stack(len(sizes), N, K, rng)
    results = []
    for bad in (0.0, float("nan")):
        g[sum(sizes) :] = x[sum(sizes) :] = bad
        row, col = reference.quantize_grouped(x, offs, BLOCKS_1X128, BLOCKS_1X128)
        y = reference.grouped_gemm(row, b, offs, None, torch.bfloat16)
        dw = reference.grouped_gemm_wgrad(columnwise(g, offs), col, offs, rows, torch.bfloat16)
        results.append((y, dw))
    for clean, spoiled in zip(*results, strict=True):
        assert_same(spoiled, clean)
    assert results[0][0][inside].any()
