"""The GEMM backends on a GPU, for every kind of shape that goes there."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Generator

from blocktensor.ops.formats import Quantized
from blocktensor.ops.gemm import cublas
from blocktensor.ops.gemm.choose_backend import GemmProblem, gemm_backend, usable_gemm_backends
from blocktensor.ops.gemm.ops import gemm
from tests.support import gemms
from tests.support.gemms import Blocks, Shape
from tests.support.numeric import FORMATS, operand, worst_row

pytest.importorskip("triton")

from blocktensor.ops.gemm import triton_gemm
from blocktensor.ops.gemm.hopper import launch as hopper

CUDA = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = (1, 3, 4, 12, 16, 48, 127, 128, 129, 130, 144, 272, 300, 576, 1100, 2112, 10944)
MODULES = {"gluon": hopper, "cublas": cublas, "triton": triton_gemm}
HOPPER_BLOCKS = ((1, 128), (1, 1))
TRITON_BLOCKS = (*HOPPER_BLOCKS, (128, 1), (128, 128))
SWEEPS = [
    ("triton", (1, 128), BF16, 30),
    ("triton", (1, 1), FP32, 30),
    ("triton", (128, 1), BF16, 17),
    ("triton", (128, 128), FP32, 17),
    ("triton", (1, 128), FP16, 3),
    *product(["gluon"], HOPPER_BLOCKS, [BF16], [40]),
    *product(["cublas"], HOPPER_BLOCKS, [BF16, FP32], [80]),
]
KINDS = [*product(["triton"], TRITON_BLOCKS), *product(["gluon", "cublas"], HOPPER_BLOCKS)]


def sample(name: str, blocks: Blocks, dtype: torch.dtype, count: int) -> list[Shape]:
    """Shapes that the backend takes."""

    def accepted(shape: Shape) -> bool:
        a, b = (FORMATS[rows] for rows in blocks)
        return gemm_backend(name).declines(GemmProblem(*shape, a, b, dtype, CUDA)) is None

    return list(gemms.shapes(7, count, SIZES, accepted))


@pytest.fixture
def rng() -> Generator:
    return Generator(CUDA).manual_seed(0)


def functions(name: str) -> Any:
    if name not in usable_gemm_backends(CUDA):
        pytest.skip(f"{name} does not run here")
    return MODULES[name]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "blocks", "dtype", "count"), SWEEPS)
def test_shapes(name: str, blocks: Blocks, dtype: torch.dtype, count: int, rng: Generator) -> None:
    for i, shape in enumerate(sample(name, blocks, dtype, count)):
        gemms.check_shape(functions(name), shape, blocks, rng, dtype)
        if (name, dtype) == ("cublas", BF16) and i < 20:
            gemms.check_shape(cublas, shape, blocks, rng, dtype, BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("check", gemms.CHECKS)
@pytest.mark.parametrize(("name", "blocks"), KINDS)
def test_contract(name: str, blocks: Blocks, check: gemms.Check, rng: Generator) -> None:
    check(functions(name), blocks, rng)


@pytest.mark.gpu
@pytest.mark.parametrize(("bias", "dtype"), [(BF16, BF16), (FP32, BF16), (FP32, FP32)])
@pytest.mark.parametrize(("name", "last"), [("triton", (5, 3, 0)), ("gluon", (4096, 264, 64))])
def test_bias(name: str, last: Any, bias: torch.dtype, dtype: torch.dtype, rng: Generator) -> None:
    for shape in ((130, 129, 300), (300, 576, 576), (3, 1, 5), last):
        gemms.check_shape(functions(name), Shape(*shape), (1, 128), rng, dtype, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "gluon"])
def test_more_than_2_to_the_31_elements(name: str, rng: Generator) -> None:
    """The last rows of a long operand and of a large output."""
    a, b = operand(2**20 + 130, 2112, 1, rng), operand(2176, 2112, 128, rng)
    out = functions(name).gemm(a, b, None, BF16)
    assert min(a.data.numel(), out.numel()) > 2**31
    tail = Quantized(a.data[-130:], a.scale[-130:], a.format)
    assert worst_row(out[-130:], tail, b) <= gemms.TOLERANCE[BF16]


@pytest.mark.gpu
@pytest.mark.parametrize("force", [None, "triton", "cublas", "reference"])
def test_the_op_runs_every_backend(
    force: str | None, rng: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if force is not None:
        if force not in usable_gemm_backends(CUDA):
            pytest.skip(f"{force} does not run here")
        monkeypatch.setenv("BLOCKTENSOR_GEMM", force)
    a, b = gemms.operands(Shape(300, 576, 2112), (1, 128), rng)
    assert worst_row(gemm(a, b, out_dtype=FP32), a, b) <= gemms.TOLERANCE[FP32]
    assert worst_row(gemm(a, b), a, b) <= gemms.TOLERANCE[BF16]
