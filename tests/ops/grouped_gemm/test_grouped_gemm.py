"""Grouped GEMMs on a GPU against the reference: every tile of every backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktensor.ops import formats, reference
from blocktensor.ops.formats import BLOCKS_1X128_POW2, BLOCKS_128X128, Quantized
from blocktensor.ops.grouped_gemm import choose_backend, tiles
from blocktensor.ops.grouped_gemm.ops import grouped_gemm, grouped_gemm_wgrad
from blocktensor.ops.runtime.specialize import GEMM_VARIABLE
from tests.support.asserts import no_synchronization
from tests.support.casts import Functions, kernels
from tests.support.gemms import TOLERANCE
from tests.support.groups import RANKS, Groups, Operands, drawn, ends, exact, operands
from tests.support.numeric import assert_same, relative_error

pytestmark = pytest.mark.gpu

CUDA = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDTHS = (256, 1408, 136, 2880, 130, 1)
DEPTHS = (576, 2048, 144, 128, 2880, 200)
every_backend = pytest.mark.usefixtures("backend")


@pytest.fixture(params=["gluon", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for sm_90")
    monkeypatch.setenv(GEMM_VARIABLE, request.param)


def assert_close(made: Tensor, wanted: Tensor, where: object) -> None:
    assert made.isfinite().all(), where
    error = relative_error(made, wanted) if wanted.any() else made.abs().sum().item()
    assert error <= TOLERANCE[made.dtype], (where, error)


def check_wgrad(a: Quantized, b: Quantized, offs: Tensor, case: Groups, dtype: torch.dtype) -> None:
    dw = grouped_gemm_wgrad(a, b, offs, case.tokens, dtype)
    wanted = reference.grouped_gemm_wgrad(a, b, offs, case.tokens, FP32)
    assert_close(dw, wanted, (case, "wgrad"))
    empty = torch.tensor([size == 0 for size in case.sizes], device=CUDA)
    assert not dw[empty].any(), (case, "of no tokens")


def check(case: Groups, made: Operands, dtype: torch.dtype) -> None:
    offs, (x, x_col), (_, g_col), w = made
    for bias in (None, torch.randn(len(case.sizes), case.n, device=CUDA).bfloat16()):
        y = grouped_gemm(x, w, offs, bias, dtype)
        assert_close(y, reference.grouped_gemm(x, w, offs, bias, FP32), (case, "gemm"))
        assert not y[sum(case.sizes) :].any(), "rows of no group are zeros"
    check_wgrad(g_col, x_col, offs, case, dtype)


@every_backend
@pytest.mark.parametrize(("dtype", "count"), [(BF16, 24), (FP32, 12), (FP16, 3)])
def test_any_groups(dtype: torch.dtype, count: int) -> None:
    for case in drawn(count, count, WIDTHS, DEPTHS):
        made = operands(case, CUDA)
        if dtype == FP16:
            made.g[1].scale.mul_(2**-8)  # products of some 10^4, else beyond fp16
        check(case, made, dtype)


@every_backend
def test_power_of_two_scales() -> None:
    case = Groups((129, 0, 300), 3, 264, 576)
    check(case, operands(case, CUDA, BLOCKS_1X128_POW2, formats.BLOCKS_128X128_POW2), BF16)


@pytest.mark.parametrize(("dtype", "count"), [(BF16, 24), (FP32, 12)])
def test_weight_gradients_of_x_in_squares(dtype: torch.dtype, count: int) -> None:
    """By whichever backend takes them; also with the operands exchanged."""
    for case in drawn(count + 1, count, WIDTHS, DEPTHS):
        offs, (_, x), (_, g), _ = operands(case, CUDA, x_columnwise=BLOCKS_128X128)
        for a, b in ((g, x), (x, g)):
            check_wgrad(a, b, offs, case, dtype)


@every_backend
@pytest.mark.parametrize("rank", RANKS)
def test_a_low_rank_product_is_added(rank: int) -> None:
    """Bit for bit: fp32 holds all sums. Rows of no group are NaN in ``left``."""
    for case in drawn(rank, 6, WIDTHS, DEPTHS):
        offs, x, w, left, right = exact(case, rank, CUDA)
        for bias in (None, torch.ones(len(case.sizes), case.n, device=CUDA)):
            for dtype in (FP32, BF16):
                given = x, w, offs, bias, dtype, case.tokens, left, right
                assert_same(grouped_gemm(*given), reference.grouped_gemm(*given))


@pytest.mark.parametrize("found", tiles.SQUARES, ids=lambda found: found.tile.name)
def test_every_tile_adds_a_low_rank_product(
    found: tiles.GroupedTile, gluon: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "SQUARES", (found,))
    for i, rank in enumerate(RANKS):
        for case in drawn(i, 4, (256, 1408, 136), DEPTHS):
            offs, x, w, left, right = exact(case, rank, CUDA)
            given = x, w, offs, None, BF16, case.tokens, left, right
            assert_same(gluon.grouped_gemm(*given), reference.grouped_gemm(*given))


@every_backend
@pytest.mark.parametrize("x_columnwise", [None, BLOCKS_128X128])
def test_nan_of_one_group_reaches_no_other(x_columnwise: formats.BlockFormat | None) -> None:
    for sizes in ((0, 512, 0), (300, 0, 84), (128, 3 * 128, 0), (1, 0, 0)):
        case = Groups(sizes, 0, 256, 576)
        offs, (_, x), (_, g), _ = operands(case, CUDA, x_columnwise=x_columnwise)
        for operand in (x, g):
            operand.scale.fill_(float("nan"))
        dw = grouped_gemm_wgrad(g, x, offs, case.tokens)
        for e, size in enumerate(sizes):
            assert dw[e].isnan().all() if size else not dw[e].any(), (sizes, e)


@pytest.fixture
def gluon() -> Iterator[Functions]:
    """The functions of the backend, which choose tiles anew."""
    tables = tiles.choose_gemm_tile, tiles.choose_wgrad_tile
    for table in tables:
        table.cache_clear()
    yield kernels("gluon", choose_backend.GROUPED_BACKENDS)
    for table in tables:
        table.cache_clear()


@pytest.mark.parametrize("found", tiles.SQUARES, ids=lambda found: found.tile.name)
def test_every_tile_of_fprop(
    found: tiles.GroupedTile, gluon: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "SQUARES", (found,))
    for case in drawn(8, 8, WIDTHS, DEPTHS):
        offs, (x, _), _, w = operands(case, CUDA)
        y = gluon.grouped_gemm(x, w, offs, None, BF16)
        assert_close(y, reference.grouped_gemm(x, w, offs, None, FP32), case)


@pytest.mark.parametrize(
    ("kind", "found"),
    [(kind, found) for kind in ("ROWS", "WGRAD_SQUARES") for found in getattr(tiles, kind)],
    ids=lambda value: value if isinstance(value, str) else value.tile.name,
)
def test_every_tile_of_wgrad(
    kind: str, found: tiles.GroupedTile, gluon: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, kind, (found,))
    tile = found.tile
    widths = [n for n in (*WIDTHS, tile.m, 2 * tile.m) if tiles.stores_fit(tile, n)]
    x_columnwise = BLOCKS_128X128 if tile.b_block == 128 else None
    for case in drawn(8, 8, widths, DEPTHS):
        offs, (_, x), (_, g), _ = operands(case, CUDA, x_columnwise=x_columnwise)
        wanted = reference.grouped_gemm_wgrad(g, x, offs, case.tokens, FP32)
        assert_close(gluon.grouped_gemm_wgrad(g, x, offs, case.tokens, BF16), wanted, case)


def reordered(sizes: list[int], order: list[int]) -> Tensor:
    """The places of parts of these sizes, in another order."""
    parts = torch.arange(sum(sizes), device=CUDA).split(sizes)
    return torch.cat([parts[e] for e in order])


def test_results_do_not_depend_on_other_groups() -> None:
    case = Groups((300, 128, 0, 1, 517, 129), 0, 1408, 2048)
    offs, (x, x_col), (_, g_col), w = operands(case, CUDA)
    y = grouped_gemm(x, w, offs)
    dw = grouped_gemm_wgrad(g_col, x_col, offs, case.tokens)
    order = [4, 2, 5, 0, 3, 1]
    offs = ends(*(case.sizes[e] for e in order), device=CUDA)
    rows = reordered([*case.sizes], order)
    blocks = reordered([-(-size // 128) for size in case.sizes], order)
    columns = (blocks[:, None] * 128 + torch.arange(128, device=CUDA)).flatten()

    def parts(form: Quantized, at: Any) -> Tensor:
        return form.data.view(torch.uint8)[at].view(form.data.dtype)

    def of_blocks(form: Quantized) -> Quantized:
        made = Quantized(torch.zeros_like(form.data), torch.zeros_like(form.scale), form.format)
        made.data[:, : len(columns)] = parts(form, (slice(None), columns))
        made.scale[:, : len(blocks)] = form.scale[:, blocks]
        return made

    permuted = Quantized(parts(x, rows), x.scale[rows].t().contiguous().t(), x.format)
    experts = Quantized(parts(w, order), w.scale[order].contiguous(), w.format)
    assert_same(grouped_gemm(permuted, experts, offs), y[rows])
    made = grouped_gemm_wgrad(of_blocks(g_col), of_blocks(x_col), offs, case.tokens)
    assert_same(made, dw[order])


def test_one_graph_serves_other_groups() -> None:
    case = Groups((300, 128, 84), 0, 256, 576)
    offs, (x, _), _, w = operands(case, CUDA)
    grouped_gemm(x, w, offs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = grouped_gemm(x, w, offs)
    for sizes in ((300, 128, 84), (0, 512, 0), (1, 2, 3), (512, 0, 0)):
        offs.copy_(ends(*sizes, device=CUDA))
        graph.replay()
        assert_close(y, reference.grouped_gemm(x, w, offs, None, FP32), sizes)


def test_ends_that_decrease_or_lie_beyond_the_tokens_write_nothing_else() -> None:
    case = Groups((300, 200, 12), 0, 256, 576)
    _, (x, _), _, w = operands(case, CUDA)
    for wrong in ([600, 700, 800], [400, 100, 512], [-5, 100, 90]):
        offs = torch.tensor(wrong, dtype=torch.int32, device=CUDA)
        y = grouped_gemm(x, w, offs)
        clamped = reference.grouped_gemm(x, w, offs, None, FP32)
        assert_close(y, clamped, wrong)


@pytest.mark.unchecked
def test_a_step_reads_nothing_on_the_host() -> None:
    case = Groups((300, 0, 84), 9, 256, 576)
    offs, (x, x_col), (_, g_col), w = operands(case, CUDA)
    with no_synchronization():
        grouped_gemm(x, w, offs)
        grouped_gemm_wgrad(g_col, x_col, offs, case.tokens)
