"""The portable GEMM on a GPU."""

from __future__ import annotations

import pytest
import torch

from blocktensor.ops import reference
from blocktensor.ops.cast.ops import quantize_both, quantize_rowwise, transpose
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128, Quantized
from blocktensor.ops.gemm.choose_backend import usable_gemm_backends
from blocktensor.ops.gemm.ops import gemm, gemm_add_
from tests.support import gemms
from tests.support.gemms import Shape
from tests.support.numeric import operand, relative_error, worst_row

pytest.importorskip("triton")

from blocktensor.ops.gemm import triton_gemm

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = (1, 3, 127, 128, 129, 130, 300, 576, 1100, 2112, 10944)
BLOCKS = ((1, 128), (1, 1), (128, 1), (128, 128))
every_kind = pytest.mark.parametrize("blocks", BLOCKS, ids=str)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator(CUDA).manual_seed(0)


@pytest.mark.parametrize(
    ("blocks", "dtype", "count"),
    [
        ((1, 128), BF16, 30),
        ((1, 1), FP32, 30),
        ((128, 1), BF16, 10),
        ((128, 128), FP32, 10),
    ],
)
def test_shapes(
    blocks: tuple[int, int], dtype: torch.dtype, count: int, rng: torch.Generator
) -> None:
    for shape in gemms.shapes(count, count, SIZES, lambda _: True):
        gemms.check(triton_gemm, *gemms.operands(shape, blocks, rng), dtype)


def test_fp16_output(rng: torch.Generator) -> None:
    for shape in (Shape(300, 576, 2112), Shape(130, 129, 130)):
        a, b = gemms.operands(shape, (1, 128), rng)
        a.scale.mul_(2**-12)  # products of some 10^4, else beyond fp16
        gemms.check(triton_gemm, a, b, FP16)


@pytest.mark.parametrize(("bias_dtype", "dtype"), [(BF16, BF16), (FP32, BF16), (FP32, FP32)])
def test_bias(bias_dtype: torch.dtype, dtype: torch.dtype, rng: torch.Generator) -> None:
    for shape in (Shape(130, 129, 300), Shape(300, 576, 576), Shape(3, 1, 5), Shape(5, 3, 0)):
        bias = 1000 * torch.randn(shape.n, generator=rng, device=CUDA).to(bias_dtype)
        gemms.check(triton_gemm, *gemms.operands(shape, (1, 128), rng), dtype, bias)


def test_strided_bias(rng: torch.Generator) -> None:
    bias = torch.randn(2 * 129, generator=rng, device=CUDA).mul(1000)[::2]
    assert not bias.is_contiguous()
    a, b = gemms.operands(Shape(130, 129, 300), (1, 128), rng)
    out = gemm(a, b, bias=bias, out_dtype=FP32)
    assert worst_row(out, a, b, bias) <= gemms.TOLERANCE[FP32]


@every_kind
def test_accumulation(blocks: tuple[int, int], rng: torch.Generator) -> None:
    for m, n, k in ((130, 129, 300), (300, 576, 2112), (1, 1, 1), (3, 300, 128)):
        a, b = operand(m, k, blocks[0], rng), operand(n, k, blocks[1], rng)
        whole = 1000 * torch.randn((m, n + 3), generator=rng, device=CUDA)
        before = whole.clone()
        triton_gemm.gemm_add_(whole[:, :n], a, b)
        want = before[:, :n] + reference.gemm(a, b, None, FP32)
        assert relative_error(whole[:, :n], want) <= gemms.TOLERANCE[FP32]
        assert torch.equal(whole[:, n:], before[:, n:])


@pytest.mark.parametrize("check", gemms.CHECKS)
@every_kind
def test_contract(blocks: tuple[int, int], check: gemms.Check) -> None:
    check(triton_gemm, blocks, CUDA)


def test_more_than_2_to_the_31_elements(rng: torch.Generator) -> None:
    """The last rows of a long operand, and of a large output."""
    a, b = operand(2**20 + 130, 2112, 1, rng), operand(2176, 2112, 128, rng)
    out = triton_gemm.gemm(a, b, None, BF16)
    assert min(a.data.numel(), out.numel()) > 2**31
    tail = Quantized(a.data[-130:], a.scale[-130:], a.format)
    assert worst_row(out[-130:], tail, b) <= gemms.TOLERANCE[BF16]


# Through the op: whichever backend is chosen or forced


@pytest.mark.parametrize("force", [None, "triton", "cublas", "reference"])
def test_the_op_runs_every_backend(
    force: str | None, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if force is not None:
        if force not in usable_gemm_backends(CUDA):
            pytest.skip(f"{force} does not run here")
        monkeypatch.setenv("BLOCKTENSOR_GEMM", force)
    a, b = gemms.operands(Shape(300, 576, 2112), (1, 128), rng)
    assert worst_row(gemm(a, b, out_dtype=FP32), a, b) <= gemms.TOLERANCE[FP32]
    assert worst_row(gemm(a, b), a, b) <= gemms.TOLERANCE[BF16]


def test_empty_products(rng: torch.Generator) -> None:
    for m, n, k in ((0, 5, 16), (5, 0, 16), (4, 16, 0), (0, 0, 0)):
        a, b = operand(m, k, 1, rng), operand(n, k, 128, rng)
        bias = torch.arange(float(n), device=CUDA)
        assert torch.equal(gemm(a, b), torch.zeros((m, n), dtype=BF16, device=CUDA))
        assert torch.equal(gemm(a, b, bias=bias).float(), bias.expand(m, n))
        out = torch.ones((m, n), device=CUDA)
        assert torch.equal(gemm_add_(out, a, b), torch.ones_like(out))


def test_cast_and_product_on_the_gpu(rng: torch.Generator) -> None:
    """The three products of a linear, from casts made there."""
    x = torch.randn((300, 576), generator=rng, device=CUDA).to(BF16)
    w = torch.randn((1100, 576), generator=rng, device=CUDA).to(BF16)
    g = torch.randn((300, 1100), generator=rng, device=CUDA).to(BF16)
    x_row, x_col = quantize_both(x, BLOCKS_1X128)
    g_row, g_col = quantize_both(g, BLOCKS_1X128)
    w_fp8 = quantize_rowwise(w, BLOCKS_128X128)
    for a, b, exact in (
        (x_row, w_fp8, x.double() @ w.double().T),
        (g_row, transpose(w_fp8), g.double() @ w.double()),
        (g_col, x_col, g.double().T @ x.double()),
    ):
        out = gemm(a, b, out_dtype=FP32)
        assert worst_row(out, a, b) <= gemms.TOLERANCE[FP32]
        assert relative_error(out, exact) < 0.05  # what e4m3 leaves of normal data
