"""The reference casts against an explicit loop over blocks with its own e4m3 rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from blocktensor.ops import formats, reference
from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_1X128_POW2, BlockFormat, Quantized
from tests.support import numeric
from tests.support.numeric import DTYPES, E4M3, KINDS, assert_same, assert_same_forms, values

SIZES = (0, 1, 127, 128, 129, 130, 300, 576)


def in_formats(*chosen: BlockFormat) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("format", chosen, ids=lambda format: format.name)


every_format = in_formats(*formats.KERNEL_FORMATS)
squares = in_formats(formats.BLOCKS_128X128, formats.BLOCKS_128X128_POW2)


def check(cast: Callable[..., Quantized], x: Tensor, format: BlockFormat) -> None:
    """``cast(x)`` equals the oracle's cast of ``x``, byte for byte."""
    data, scale, made = cast(x, format)
    want_data, want_scale = numeric.cast_by_blocks(x, format.block_shape, format.scale_rounding)
    assert made is format
    assert data.is_contiguous()
    assert_same(data, torch.from_numpy(want_data).view(E4M3))
    assert_same(scale, torch.from_numpy(want_scale))


def columnwise(x: Tensor, format: BlockFormat) -> Quantized:
    """The columnwise cast of ``x.t()``: the rowwise cast of ``x``, and zeros after it."""
    rows, cols = x.shape
    cast = reference.quantize_columnwise(x.t(), format)
    step = 64 if format.cols % 64 == 0 else 16 if format.cols % 16 == 0 else 1
    width = -(-cols // step) * step
    assert cast.data.shape == (rows, width)
    if width > cols:  # in a block with NaN, NaN
        is_nan = cast.scale[:, -1:].isnan().repeat_interleave(format.rows, 0)[:rows]
        is_nan = is_nan.expand(-1, width - cols)
        assert_same(cast.data[:, cols:], torch.where(is_nan, math.nan, 0.0).to(E4M3))
    return cast._replace(data=cast.data[:, :cols].contiguous())


def test_oracle_rounds_as_torch_does_on_finite_values() -> None:
    bits = torch.arange(0, 2**32, 4099, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    x = x[x.isfinite() & (x.abs() <= 448)]
    assert len(x) > 400_000
    assert_same(x.to(E4M3), torch.from_numpy(numeric.e4m3_bytes(x.double().numpy())).view(E4M3))
    magnitudes = torch.arange(127, dtype=torch.uint8).view(E4M3).double()
    assert magnitudes.tolist() == numeric.MAGNITUDES.tolist()
    assert numeric.MAGNITUDES[-1] == reference.largest(BLOCKS_1X128) == 448


@every_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape(dtype: torch.dtype, format: BlockFormat, rng: Generator) -> None:
    shapes = [(rows, cols) for rows, cols in product(SIZES, SIZES) if rows * cols <= 576 * 130]
    for kind, shape in zip(cycle(KINDS), shapes, strict=False):
        x = values(kind, *shape, dtype, rng)
        check(reference.quantize_rowwise, x, format)
        check(columnwise, x, format)


@every_format
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_value(
    kind: str, dtype: torch.dtype, format: BlockFormat, rng: Generator
) -> None:
    x = values(kind, 130, 300, dtype, rng)
    check(reference.quantize_rowwise, x, format)
    check(columnwise, x, format)


@every_format
@pytest.mark.parametrize("view", ["transposed", "sliced", "stepped", "one row", "overlapping"])
def test_strided_inputs(view: str, format: BlockFormat, rng: Generator) -> None:
    x = numeric.view_of(view, "bits", 130, 129, torch.bfloat16, rng)
    assert not x.is_contiguous()
    check(reference.quantize_rowwise, x, format)
    check(columnwise, x, format)


@squares
@pytest.mark.parametrize("shape", [(3, 130, 300), (2, 128, 256), (1, 1, 129), (0, 5, 7), (2, 0, 9)])
def test_a_stack_is_cast_matrix_by_matrix(shape: Any, format: BlockFormat, rng: Generator) -> None:
    x = values("bits", shape[0] * shape[1], shape[2], torch.bfloat16, rng).view(shape)
    data, scale, _ = reference.quantize_rowwise(x, format)
    for matrix, *got in zip(x, data, scale, strict=True):
        assert_same_forms(Quantized(*got, format), reference.quantize_rowwise(matrix, format))


@in_formats(
    BlockFormat("1x32", (1, 32)),
    BlockFormat("64x64", (64, 64), "power_of_two"),
    BlockFormat("3x50", (3, 50)),
)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_other_sizes(kind: str, format: BlockFormat, rng: Generator) -> None:
    for rows, cols in ((130, 300), (1, 1), (64, 50), (0, 7), (7, 0)):
        x = values(kind, rows, cols, torch.bfloat16, rng)
        check(reference.quantize_rowwise, x, format)
        check(columnwise, x, format)
        if format.transposes:
            got = reference.transpose(reference.quantize_rowwise(x, format))
            assert_same(got.data, reference.quantize_rowwise(x.t(), format).data)


def test_data_of_another_dtype() -> None:
    e5m2 = BlockFormat("2x4", (2, 4), dtype=torch.float8_e5m2)
    assert reference.largest(e5m2) == 57344
    x = torch.tensor([[3.0, -1, 0, 0.5, 1e9], [2, 7, -4, 1, -1e-9]])
    data, scale, _ = reference.quantize_rowwise(x, e5m2)
    assert data.dtype == torch.float8_e5m2
    assert_same(scale, torch.tensor([[7 / 57344, 1e9 / 57344]]))
    value = reference.dequantize(Quantized(data, scale, e5m2), torch.float32)
    assert torch.allclose(value, x, rtol=2**-3, atol=1e-2)
    for format, largest in ((e5m2, 57344), (BLOCKS_1X128, 448)):
        beyond = largest * torch.tensor([1.002, 1.05, 1e9, math.inf, -1.05, -math.inf])
        assert reference.to_data(beyond, format).tolist() == 4 * [largest] + 2 * [-largest]


@pytest.mark.parametrize(
    ("amax", "fp32", "power_of_two"),
    [
        (448.0, 1.0, 1.0),
        (896.0, 2.0, 2.0),
        (449.0, 449 / 448, 2.0),
        (1.0, 1 / 448, 2.0**-8),
        (448 * 2.0**-126, 2.0**-126, 2.0**-126),
        (448 * 2.0**-127, 2.0**-127, 2.0**-126),  # a subnormal scale
        (448 * 2.0**-149, 2.0**-149, 2.0**-126),
        (224 * 2.0**-149, 1.0, 1.0),  # half the smallest scale: rounds to even, to zero
        (225 * 2.0**-149, 2.0**-149, 2.0**-126),
        (2.0**-149, 1.0, 1.0),
        (3.4028234663852886e38, 3.4028234663852886e38 / 448, 2.0**120),
    ],
)
def test_scale_of_an_amax(amax: float, fp32: float, power_of_two: float) -> None:
    for wanted, format in ((fp32, BLOCKS_1X128), (power_of_two, BLOCKS_1X128_POW2)):
        assert_same(reference.scale_from_amax(torch.tensor([amax]), format), torch.tensor([wanted]))


@pytest.mark.parametrize("payload", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -(2**22), 1 - 2**23])
def test_every_nan_becomes_one_nan(payload: int) -> None:
    x = torch.tensor([[1.0, -2.0, 0.0]])
    x.view(torch.int32)[0, 2] = payload
    data, scale, _ = reference.quantize_rowwise(x, BLOCKS_1X128)
    assert data.view(torch.uint8).tolist() == [[0x7F] * 3]
    power_of_two = reference.scale_from_amax(x[:, 2:], BLOCKS_1X128_POW2)
    for made in (scale, power_of_two):
        assert made.view(torch.int32).tolist() == [[0x7FC00000]]


@squares
@pytest.mark.parametrize("shape", [(130, 300), (1, 129), (0, 5), (3, 130, 300), (2, 128, 1)])
def test_transpose_of_a_square_cast_is_the_cast_of_the_transpose(
    shape: tuple[int, ...], format: BlockFormat, rng: Generator
) -> None:
    x = values("nan", math.prod(shape[:-1]), shape[-1], torch.bfloat16, rng).view(shape)
    got = reference.transpose(reference.quantize_rowwise(x, format))
    assert got.data.is_contiguous()
    want = reference.quantize_rowwise(x.mT, format)
    assert got.scale.stride() == want.scale.stride()
    assert_same_forms(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@every_format
def test_values_at_the_limit_of_a_dtype_stay_finite(
    format: BlockFormat, dtype: torch.dtype
) -> None:
    """All that lie between the two largest e4m3 numbers below the limit."""
    limit = torch.finfo(dtype).max
    near = torch.linspace(0.9, 1, 64, dtype=torch.float64)
    x = torch.cat([near * limit, -near * limit])[None].to(dtype)
    got = reference.dequantize(reference.quantize_rowwise(x, format), dtype)
    assert got.isfinite().all()
    assert ((got.double() - x.double()).abs() <= x.double().abs() / 16).all()
    if format.power_of_two:
        assert_same(got[0, [63, 127]], x[0, [63, 127]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_or_nan_scale_is_not_hidden(dtype: torch.dtype) -> None:
    data, scale = torch.ones(3, 1).to(E4M3), torch.tensor([[math.inf], [-math.inf], [math.nan]])
    assert_same(reference.dequantize(Quantized(data, scale, BLOCKS_1X128), dtype), scale.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(130, 300), (128, 256), (1, 1), (0, 3), (3, 0)])
def test_dequantize_multiplies_in_fp32_and_rounds_once(
    shape: tuple[int, int], dtype: torch.dtype, rng: Generator
) -> None:
    x = values("normal", *shape, torch.float32, rng)
    for format in (BLOCKS_1X128, formats.BLOCKS_128X128):
        q = reference.quantize_rowwise(x, format)
        assert_same(reference.dequantize(q, dtype), numeric.expand(q).float().to(dtype))
