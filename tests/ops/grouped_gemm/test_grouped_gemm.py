"""Grouped GEMMs on a GPU against the reference: every tile of every backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocktensor.ops import reference
from blocktensor.ops.devices import sms
from blocktensor.ops.formats import (
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    BlockFormat,
    Quantized,
)
from blocktensor.ops.gemm.ops import gemm
from blocktensor.ops.grouped_gemm import choose_backend, tiles
from blocktensor.ops.grouped_gemm.ops import (
    grouped_gemm,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_add_,
)
from blocktensor.ops.runtime.specialize import GEMM_VARIABLE
from tests.support.casts import kernels
from tests.support.drawn_groups import Groups, Operands, drawn, operands
from tests.support.gemms import TOLERANCE
from tests.support.groups import ends
from tests.support.numeric import assert_same, relative_error
from tests.support.synchronization import no_synchronization

pytestmark = pytest.mark.gpu

CUDA = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDTHS = (256, 1408, 136, 2880, 130, 1)
DEPTHS = (576, 2048, 144, 128, 2880, 200)
every_backend = pytest.mark.parametrize("backend", ["gluon", "triton"])


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, so that an element that nobody writes is seen."""
    made = torch.empty

    def empty(*args: object, **kwargs: object) -> Tensor:
        x = made(*args, **kwargs)  # type: ignore[call-overload]
        return x.fill_(float("nan")) if x.dtype.is_floating_point and x.itemsize > 1 else x

    monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture
def backend_of(backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if backend == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for sm_90")
    monkeypatch.setenv(GEMM_VARIABLE, backend)
    return backend


def assert_close(made: Tensor, wanted: Tensor, where: object) -> None:
    assert made.isfinite().all(), where
    error = relative_error(made, wanted) if wanted.any() else made.abs().sum().item()
    assert error <= TOLERANCE[made.dtype], (where, error)


def check(case: Groups, made: Operands, dtype: torch.dtype) -> None:
    offs, (x, x_col), (_, g_col), w = made
    bias = torch.randn(len(case.sizes), case.n, device=CUDA).bfloat16()
    for added in (None, bias):
        y = grouped_gemm(x, w, offs, added, dtype)
        assert_close(y, reference.grouped_gemm(x, w, offs, added, FP32), (case, "gemm"))
        assert not y[sum(case.sizes) :].any(), "rows of no group are zeros"
    dw = grouped_gemm_wgrad(g_col, x_col, offs, case.tokens, dtype)
    wanted = reference.grouped_gemm_wgrad(g_col, x_col, offs, case.tokens, FP32)
    assert_close(dw, wanted, (case, "wgrad"))
    if dtype == FP32:
        before = torch.randn_like(wanted)
        after = grouped_gemm_wgrad_add_(before.clone(), g_col, x_col, offs, case.tokens)
        assert_close(after, before + wanted, (case, "+="))
        empty = torch.tensor([size == 0 for size in case.sizes], device=CUDA)
        assert_same(after[empty], before[empty])


@every_backend
@pytest.mark.parametrize(("dtype", "count"), [(BF16, 24), (FP32, 12), (FP16, 3)])
@pytest.mark.usefixtures("backend_of")
def test_any_groups(dtype: torch.dtype, count: int) -> None:
    for case in drawn(count, count, WIDTHS, DEPTHS):
        made = operands(case, CUDA)
        if dtype == FP16:
            made.g[1].scale.mul_(2**-8)  # products of some 10^4, else beyond fp16
        check(case, made, dtype)


@every_backend
@pytest.mark.usefixtures("backend_of")
def test_power_of_two_scales() -> None:
    case = Groups((129, 0, 300), 3, 264, 576)
    check(case, operands(case, CUDA, BLOCKS_1X128_POW2, BLOCKS_128X128_POW2), BF16)


@pytest.mark.parametrize(("dtype", "count"), [(BF16, 24), (FP32, 12)])
def test_weight_gradients_of_x_in_squares(dtype: torch.dtype, count: int) -> None:
    """By whichever backend takes them; also with the operands exchanged."""
    for case in drawn(count + 1, count, WIDTHS, DEPTHS):
        offs, (_, x), (_, g), _ = operands(case, CUDA, x_columnwise=BLOCKS_128X128)
        for a, b in ((g, x), (x, g)):
            dw = grouped_gemm_wgrad(a, b, offs, case.tokens, dtype)
            wanted = reference.grouped_gemm_wgrad(a, b, offs, case.tokens, FP32)
            assert_close(dw, wanted, case)
            if dtype == FP32:
                before = torch.randn_like(wanted)
                after = grouped_gemm_wgrad_add_(before.clone(), a, b, offs, case.tokens)
                assert_close(after, before + wanted, (case, "+="))


@every_backend
@pytest.mark.parametrize("x_columnwise", [None, BLOCKS_128X128])
@pytest.mark.usefixtures("backend_of")
def test_nan_of_one_group_reaches_no_other(x_columnwise: BlockFormat | None) -> None:
    """Also where an empty group follows, whose zeros are a sum beyond the last block."""
    for sizes in ((0, 512, 0), (300, 0, 84), (128, 3 * 128, 0), (1, 0, 0)):
        case = Groups(sizes, 0, 256, 576)
        offs, (_, x), (_, g), _ = operands(case, CUDA, x_columnwise=x_columnwise)
        for operand in (x, g):
            operand.scale.fill_(float("nan"))
        dw = grouped_gemm_wgrad(g, x, offs, case.tokens)
        for e, size in enumerate(sizes):
            assert dw[e].isnan().all() if size else not dw[e].any(), (sizes, e)


@pytest.mark.parametrize("found", tiles.SQUARES, ids=lambda found: found.tile.name)
def test_every_tile_of_fprop(found: tiles.GroupedTile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SQUARES", (found,))
    tiles.choose_gemm_tile.cache_clear()
    try:
        for case in drawn(8, 8, WIDTHS, DEPTHS):
            offs, (x, _), _, w = operands(case, CUDA)
            launch = kernels("gluon", choose_backend.GROUPED_BACKENDS)
            y = launch.grouped_gemm(x, w, offs, None, BF16)
            assert_close(y, reference.grouped_gemm(x, w, offs, None, FP32), case)
    finally:
        tiles.choose_gemm_tile.cache_clear()


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (kind, found)
        for kind in ("ROWS", "ADDED", "WGRAD_SQUARES", "ADDED_SQUARES")
        for found in getattr(tiles, kind)
    ],
    ids=lambda value: value if isinstance(value, str) else value.tile.name,
)
def test_every_tile_of_wgrad(
    kind: str, found: tiles.GroupedTile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, kind, (found,))
    tiles.choose_wgrad_tile.cache_clear()
    try:
        tile = found.tile
        widths = [n for n in (*WIDTHS, tile.m, 2 * tile.m) if tiles.stores_fit(tile, n, 256)]
        depths = [k for k in DEPTHS if tiles.stores_fit(tile, tile.m, k)]
        x_columnwise = BLOCKS_128X128 if tile.b_block == 128 else None
        for case in drawn(8, 8, widths, depths):
            offs, (_, x), (_, g), _ = operands(case, CUDA, x_columnwise=x_columnwise)
            launch = kernels("gluon", choose_backend.GROUPED_BACKENDS)
            wanted = reference.grouped_gemm_wgrad(g, x, offs, case.tokens, FP32)
            if not kind.startswith("ADDED"):
                dw = launch.grouped_gemm_wgrad(g, x, offs, case.tokens, BF16)
                assert_close(dw, wanted, case)
            else:
                dw = torch.ones_like(wanted)
                launch.grouped_gemm_wgrad_add_(dw, g, x, offs, case.tokens)
                assert_close(dw, wanted + 1, case)
    finally:
        tiles.choose_wgrad_tile.cache_clear()


def test_results_do_not_depend_on_other_groups() -> None:
    case = Groups((300, 128, 0, 1, 517, 129), 0, 1408, 2048)
    offs, (x, x_col), (_, g_col), w = operands(case, CUDA)
    y = grouped_gemm(x, w, offs)
    dw = grouped_gemm_wgrad(g_col, x_col, offs, case.tokens)
    order = [4, 2, 5, 0, 3, 1]
    begins = [sum(case.sizes[:e]) for e in range(6)]
    rows = torch.cat([torch.arange(begins[e], begins[e] + case.sizes[e]) for e in order]).cuda()
    permuted = Quantized(x.data.view(torch.uint8)[rows].view(x.data.dtype), x.scale[rows], x.format)
    permuted = permuted._replace(scale=permuted.scale.t().contiguous().t())
    experts = Quantized(
        w.data.view(torch.uint8)[order].view(w.data.dtype), w.scale[order].contiguous(), w.format
    )
    permuted_offs = ends(*(case.sizes[e] for e in order), device=CUDA)
    assert_same(grouped_gemm(permuted, experts, permuted_offs), y[rows])

    def blocks(form: Quantized) -> Quantized:
        first = [sum(-(-size // 128) for size in case.sizes[:e]) for e in range(6)]
        count = [-(-size // 128) for size in case.sizes]
        at = torch.cat([torch.arange(first[e], first[e] + count[e]) for e in order]).cuda()
        columns = (at[:, None] * 128 + torch.arange(128, device=CUDA)).flatten()
        made = Quantized(torch.zeros_like(form.data), torch.zeros_like(form.scale), form.format)
        made.data.view(torch.uint8)[:, : len(columns)] = form.data.view(torch.uint8)[:, columns]
        made.scale[:, : len(at)] = form.scale[:, at]
        return made

    made = grouped_gemm_wgrad(blocks(g_col), blocks(x_col), permuted_offs, case.tokens)
    assert_same(made, dw[order])


def test_an_expert_equals_a_dense_product() -> None:
    case = Groups((512, 300), 0, 1536, 2048)
    offs, (x, _), _, w = operands(case, CUDA)
    y = grouped_gemm(x, w, offs, None, FP32)
    for e, rows in enumerate((slice(0, 512), slice(512, 812))):
        scale = x.scale[rows].t().contiguous().t()
        of_group = Quantized(x.data[rows], scale, x.format)
        dense = gemm(of_group, Quantized(w.data[e], w.scale[e], w.format), None, FP32)
        assert relative_error(y[rows], dense) <= 1e-6


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


def test_a_step_reads_nothing_on_the_host() -> None:
    case = Groups((300, 0, 84), 9, 256, 576)
    offs, (x, x_col), (_, g_col), w = operands(case, CUDA)
    with no_synchronization():
        grouped_gemm(x, w, offs)
        grouped_gemm_wgrad(g_col, x_col, offs, case.tokens)


def test_the_tile_is_said() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    case = Groups((4096, 4096), 0, 4096, 7168)
    made = operands(Groups((8, 8), 0, 256, 128), CUDA)
    problem = choose_backend.GroupedProblem(
        "gemm", case.tokens, case.n, case.k, 2, made.x[0].format, made.w.format, BF16, device
    )
    choice = choose_backend.choose_grouped(problem)
    if choice.name == "gluon":
        assert choice.why == "128x256 tiles"
        assert sms(device) > 0
