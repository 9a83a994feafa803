"""Byte transposes and dequantizes on a GPU equal the reference's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128, Quantized
from blocktensor.ops.scale_layouts import empty_scale
from tests.support.casts import kernels
from tests.support.numeric import DTYPES, E4M3, FORMATS, assert_same, lay_out, to_device

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPES = [
    *((128, 128), (256, 640), (1920, 384)),
    *((16, 48), (304, 576), (112, 2000)),
    *((300, 580), (308, 576), (4, 4), (256, 1004)),
    *((129, 130), (300, 577), (7, 1100), (2049, 67)),
    *((1, 1), (1, 300), (300, 1), (128, 1)),
    *((0, 5), (5, 0)),
]


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def any_bytes(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.randint(256, shape, generator=rng, dtype=torch.uint8).view(E4M3)


def any_scale(shape: tuple[int, ...], block: int, rng: torch.Generator) -> Tensor:
    """Scales of all sizes, some of them bad, NaN in the padding."""
    scale = torch.exp2(torch.randint(-40, 40, shape, generator=rng))
    bad = torch.rand(shape, generator=rng) < 0.1
    scale = torch.where(bad, torch.tensor([math.nan, math.inf]).take(scale.long() % 2), scale)
    if len(shape) == 2:
        return lay_out(scale, block)
    return empty_scale((shape[0], shape[1] * 128, shape[2] * 128), BLOCKS_128X128, CPU).copy_(scale)


def on_gpu(x: Quantized) -> Quantized:
    return Quantized(to_device(x.data, CUDA), to_device(x.scale, CUDA), x.format)


def check_transpose(data: Tensor, scale: Tensor) -> None:
    x = Quantized(data, scale, BLOCKS_128X128)
    given, want = on_gpu(x), reference.transpose(x)
    got = kernels("triton").transpose(given)
    assert got.data.is_contiguous()
    assert got.format is BLOCKS_128X128
    assert_same(got.data.cpu(), want.data)
    assert_same(got.scale.cpu(), want.scale)
    if scale.numel():
        assert got.scale.stride() == empty_scale(got.data.shape, BLOCKS_128X128, CPU).stride()


@pytest.mark.parametrize("lead", [(), (3,)], ids=["matrix", "stack"])
def test_transpose(lead: tuple[int, ...], rng: torch.Generator) -> None:
    for n, k in SHAPES:
        scale = any_scale((*lead, -(-n // 128), -(-k // 128)), 128, rng)
        check_transpose(any_bytes((*lead, n, k), rng), scale)
        check_transpose(any_bytes((*lead, k, n), rng).mT, scale)


def test_transpose_of_slices_on_block_boundaries(rng: torch.Generator) -> None:
    data, scale = any_bytes((3, 640, 500), rng), any_scale((3, 5, 4), 128, rng)
    check_transpose(data[1:], scale[1:])
    check_transpose(data[1], scale[1])
    check_transpose(data[:, 128:500], scale[:, 1:4])
    check_transpose(data[..., 256:], scale[..., 2:])
    check_transpose(data[::2, :128, 128:384], scale[::2, :1, 1:3])


def check_dequantize(data: Tensor, scale: Tensor, block: int, dtype: torch.dtype) -> None:
    x = Quantized(data, scale, FORMATS[block])
    got = kernels("triton").dequantize(on_gpu(x), dtype)
    assert got.is_contiguous()
    assert_same(got.cpu(), reference.dequantize(x, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 128])
def test_dequantize(block: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    for m, k in SHAPES:
        data, scale = any_bytes((m, k), rng), any_scale((-(-m // block), -(-k // 128)), block, rng)
        check_dequantize(data, scale, block, dtype)
    wide, scale = any_bytes((300, 640), rng), any_scale((-(-300 // block), 5), block, rng)
    check_dequantize(wide[:, 128:500], scale[:, 1:4], block, dtype)
    check_dequantize(wide.t().contiguous().t(), scale, block, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_stacks(dtype: torch.dtype, rng: torch.Generator) -> None:
    data, scale = any_bytes((3, 300, 576), rng), any_scale((3, 3, 5), 128, rng)
    check_dequantize(data, scale, 128, dtype)
    check_dequantize(data[1:, 128:], scale[1:, 1:], 128, dtype)
    check_dequantize(data.mT, scale.mT, 128, dtype)
    check_dequantize(data[:, :1], scale[:, :1], 128, dtype)
