"""cuBLAS's blockwise GEMM on a GPU, for every kind of shape that the registry sends to it."""

from __future__ import annotations

import pytest
import torch

from blocktensor.ops.gemm import cublas
from blocktensor.ops.gemm.choose_backend import GemmProblem, gemm_backend, usable_gemm_backends
from blocktensor.ops.gemm.ops import gemm
from tests.support import gemms
from tests.support.gemms import Shape
from tests.support.numeric import FORMATS, worst_row

CUDA = torch.device("cuda")
BF16, FP32 = torch.bfloat16, torch.float32
SIZES = (1, 3, 4, 12, 16, 48, 127, 128, 129, 144, 272, 300, 576, 1100, 2112, 10944)
BLOCKS = ((1, 128), (1, 1))
every_kind = pytest.mark.parametrize("blocks", BLOCKS, ids=str)


def accepted(shape: Shape, blocks: tuple[int, int], dtype: torch.dtype) -> bool:
    a_format, b_format = (FORMATS[rows] for rows in blocks)
    problem = GemmProblem(*shape, a_format, b_format, dtype, CUDA)
    return gemm_backend("cublas").declines(problem) is None


@pytest.fixture
def rng() -> torch.Generator:
    if "cublas" not in usable_gemm_backends(CUDA):
        pytest.skip("no blockwise GEMM in this cuBLAS")
    return torch.Generator(CUDA).manual_seed(0)


def sample(blocks: tuple[int, int], dtype: torch.dtype) -> list[Shape]:
    return list(gemms.shapes(7, 80, SIZES, lambda shape: accepted(shape, blocks, dtype)))


@every_kind
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_sample_is_wide(blocks: tuple[int, int], dtype: torch.dtype) -> None:
    shapes = sample(blocks, dtype)
    assert len(set(shapes)) == 80
    assert any(s.k % 128 for s in shapes)
    assert any(s.n % 128 for s in shapes)
    assert any(s.m < 16 for s in shapes)


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_shapes(blocks: tuple[int, int], dtype: torch.dtype, rng: torch.Generator) -> None:
    for shape in sample(blocks, dtype):
        gemms.check(cublas, *gemms.operands(shape, blocks, rng), dtype)


@pytest.mark.gpu
@every_kind
def test_bias(blocks: tuple[int, int], rng: torch.Generator) -> None:
    for shape in sample(blocks, BF16)[:20]:
        bias = 1000 * torch.randn(shape.n, generator=rng, device=CUDA).to(BF16)
        gemms.check(cublas, *gemms.operands(shape, blocks, rng), BF16, bias)


@pytest.mark.gpu
def test_strided_bias(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTENSOR_GEMM", "cublas")
    bias = torch.randn(2 * 144, generator=rng, device=CUDA).mul(1000).to(BF16)[::2]
    assert not bias.is_contiguous()
    a, b = gemms.operands(Shape(128, 144, 272), (1, 128), rng)
    assert worst_row(gemm(a, b, bias=bias), a, b, bias) <= gemms.TOLERANCE[BF16]


@pytest.mark.gpu
@pytest.mark.parametrize("check", gemms.CHECKS)
@every_kind
def test_contract(blocks: tuple[int, int], check: gemms.Check, rng: torch.Generator) -> None:
    check(cublas, blocks, CUDA)
