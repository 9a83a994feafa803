"""The reference casts against an explicit loop over blocks with its own e4m3 rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blocktensor.ops import reference
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    BlockFormat,
    Quantized,
)
from tests.support.numeric import (
    DTYPES,
    E4M3,
    KINDS,
    MAGNITUDES,
    assert_same,
    cast_by_blocks,
    e4m3_bytes,
    e4m3_values,
    values,
    view_of,
)

SIZES = (0, 1, 127, 128, 129, 130, 300, 576)
FORMATS = (BLOCKS_1X128, BLOCKS_1X128_POW2, BLOCKS_128X128, BLOCKS_128X128_POW2)

Cast = Callable[[Tensor, BlockFormat], Quantized]


def formats(*chosen: BlockFormat) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("format", chosen, ids=lambda format: format.name)


def check(cast: Cast, x: Tensor, format: BlockFormat) -> None:
    """``cast(x)`` equals the oracle's cast of ``x``, byte for byte."""
    data, scale, made = cast(x, format)
    want_data, want_scale = cast_by_blocks(x, format.block_shape, format.power_of_two)
    assert made is format
    assert data.is_contiguous()
    assert_same(data, torch.from_numpy(want_data).view(E4M3))
    assert_same(scale, torch.from_numpy(want_scale))


def columnwise(x: Tensor, format: BlockFormat) -> Quantized:
    """The columnwise cast of ``x.t()``: the rowwise cast of ``x``, and zeros after it."""
    rows, cols = x.shape
    cast = reference.quantize_columnwise(x.t(), format)
    width = -(-cols // 16) * 16 if format.cols % 16 == 0 else cols
    assert cast.data.shape == (rows, width)
    if width > cols:  # in a block with NaN, NaN
        is_nan = cast.scale[:, -1:].isnan().repeat_interleave(format.rows, 0)[:rows]
        is_nan = is_nan.expand(-1, width - cols)
        assert_same(cast.data[:, cols:], torch.where(is_nan, math.nan, 0.0).to(E4M3))
    return cast._replace(data=cast.data[:, :cols].contiguous())


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def one_block(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float32)


# The oracle itself


def test_oracle_rounds_as_torch_does_on_finite_values() -> None:
    bits = torch.arange(0, 2**32, 4099, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    x = x[x.isfinite() & (x.abs() <= 448)]
    assert len(x) > 400_000
    assert_same(x.to(E4M3), torch.from_numpy(e4m3_bytes(x.double().numpy())).view(E4M3))


def test_oracle_knows_every_byte() -> None:
    data = torch.arange(256, dtype=torch.uint8).view(E4M3)
    np.testing.assert_array_equal(e4m3_values(data), data.double().numpy())
    assert MAGNITUDES[-1] == reference.largest(BLOCKS_1X128) == 448


# Casts


@formats(*FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "cast", [reference.quantize_rowwise, columnwise], ids=["rowwise", "columnwise"]
)
def test_every_shape(
    cast: Cast, dtype: torch.dtype, format: BlockFormat, rng: torch.Generator
) -> None:
    kinds = itertools.cycle(KINDS)
    for rows, cols in itertools.product(SIZES, SIZES):
        if rows * cols <= 576 * 130:
            check(cast, values(next(kinds), rows, cols, dtype, rng), format)


@formats(*FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_value(
    kind: str, dtype: torch.dtype, format: BlockFormat, rng: torch.Generator
) -> None:
    x = values(kind, 130, 300, dtype, rng)
    check(reference.quantize_rowwise, x, format)
    check(columnwise, x, format)


@formats(*FORMATS)
@pytest.mark.parametrize("view", ["transposed", "sliced", "stepped", "one row", "overlapping"])
def test_strided_inputs(view: str, format: BlockFormat, rng: torch.Generator) -> None:
    x = view_of(view, "bits", 130, 129, torch.bfloat16, rng)
    assert not x.is_contiguous()
    check(reference.quantize_rowwise, x, format)
    check(columnwise, x, format)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 260),
    cols=st.integers(0, 260),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    format=st.sampled_from(FORMATS),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(
    rows: int, cols: int, kind: str, dtype: torch.dtype, format: BlockFormat, seed: int
) -> None:
    x = values(kind, rows, cols, dtype, torch.Generator().manual_seed(seed))
    check(reference.quantize_rowwise, x, format)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_both_in_two_formats(kind: str, power_of_two: bool, rng: torch.Generator) -> None:
    """Columnwise squares are the transpose of the rowwise ones, and zeros."""
    rows, squares = (BLOCKS_1X128, BLOCKS_128X128)
    if power_of_two:
        rows, squares = (BLOCKS_1X128_POW2, BLOCKS_128X128_POW2)
    x = values(kind, 300, 130, torch.bfloat16, rng)
    row, col = reference.quantize_both(x, rows, squares)
    again, alike = reference.quantize_both(x, rows)
    transposed = reference.transpose(reference.quantize_rowwise(x, squares))
    assert (row.format, col.format) == (rows, squares)
    for got, want in (
        (row, reference.quantize_rowwise(x, rows)),
        (again, row),
        (alike, reference.quantize_columnwise(x, rows)),
        (col, reference.quantize_columnwise(x, squares)),
        (columnwise(x.t(), squares), transposed),
    ):
        assert_same(got.data, want.data)
        assert_same(got.scale, want.scale)
        assert got.scale.stride() == want.scale.stride()


@formats(BLOCKS_128X128, BLOCKS_128X128_POW2)
@pytest.mark.parametrize("shape", [(3, 130, 300), (2, 128, 256), (1, 1, 129), (0, 5, 7), (2, 0, 9)])
def test_a_stack_is_cast_matrix_by_matrix(
    shape: tuple[int, int, int], format: BlockFormat, rng: torch.Generator
) -> None:
    x = values("bits", shape[0] * shape[1], shape[2], torch.bfloat16, rng).view(shape)
    stack = reference.quantize_rowwise(x, format)
    assert stack.data.shape == shape
    for i, matrix in enumerate(x):
        want = reference.quantize_rowwise(matrix, format)
        assert_same(stack.data[i], want.data)
        assert_same(stack.scale[i], want.scale)


OTHERS = (
    BlockFormat("1x32", (1, 32)),
    BlockFormat("64x64", (64, 64), "power_of_two"),
    BlockFormat("3x50", (3, 50)),
)


@formats(*OTHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_other_sizes(kind: str, format: BlockFormat, rng: torch.Generator) -> None:
    """Formats that no kernel is written for; registered or not."""
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
    beyond = torch.tensor([6e4, -math.inf])
    assert reference.to_data(beyond, e5m2).tolist() == [57344, -57344]


# Scales


def test_a_zero_block_has_scale_one_and_keeps_its_signs() -> None:
    x = torch.tensor([0.0, -0.0, -0.0]).repeat(1, 100)  # [1, 300]
    data, scale, _ = reference.quantize_rowwise(x, BLOCKS_1X128)
    assert scale.tolist() == [[1.0, 1.0, 1.0]]
    assert data.view(torch.uint8).tolist() == [[0x00, 0x80, 0x80] * 100]


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
        got = reference.scale_from_amax(torch.tensor([amax]), format)
        assert_same(got, torch.tensor([wanted]))


def test_power_of_two_scales_are_the_least_that_avoid_saturation(rng: torch.Generator) -> None:
    amax = torch.randint(0x04800000, 0x7F800000, (100_000,), generator=rng).to(torch.int32)
    amax = amax.view(torch.float32)
    exact = amax.double() / 448
    scale = reference.scale_from_amax(amax, BLOCKS_128X128_POW2).double()
    assert (torch.frexp(scale).mantissa == 0.5).all()
    # amax / 448 is first rounded to fp32, which may take it down to a power of two.
    assert (scale >= exact * (1 - 2.0**-24)).all()
    assert (scale < 2 * exact).all()


# Rounding


def test_ties_go_to_the_even_byte_and_beyond_448_saturates() -> None:
    x = one_block(17, 19, 21, 23, -17, 448, 432, 416, 2.0**-10, 3 * 2.0**-10, -(2.0**-10), 2.0**-9)
    data, scale, _ = reference.quantize_rowwise(x, BLOCKS_1X128)
    assert scale.item() == 1
    want = [16, 20, 20, 24, -16, 448, 448, 416, 0, 2.0**-8, -0.0, 2.0**-9]
    assert_same(data.float(), one_block(*want))
    beyond = torch.tensor([449.0, 464.0, 1e30, -1e30, math.inf, -math.inf])
    assert reference.to_data(beyond, BLOCKS_1X128).tolist() == [448, 448, 448, -448, 448, -448]


def test_a_quotient_rounded_up_past_448_saturates(rng: torch.Generator) -> None:
    amax = 1 + torch.rand(20_000, 1, generator=rng)
    quotient = amax / reference.scale_from_amax(amax, BLOCKS_1X128)
    assert (quotient > 448).any()  # else this tests nothing
    data, _, _ = reference.quantize_rowwise(amax, BLOCKS_1X128)
    assert (data.float() == 448).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("payload", [0x7F800001, 0x7FC00000, 0x7FFFFFFF])
def test_every_nan_becomes_one_nan(sign: int, payload: int) -> None:
    nan = torch.tensor([[payload]], dtype=torch.int32).view(torch.float32)
    x = torch.cat([torch.copysign(nan, torch.tensor(float(sign))), one_block(1, -2)], 1)
    data, scale, _ = reference.quantize_rowwise(x, BLOCKS_1X128)
    assert data.view(torch.uint8).tolist() == [[0x7F] * 3]
    assert scale.view(torch.int32).tolist() == [[0x7FC00000]]
    scale = reference.scale_from_amax(x[:, :1], BLOCKS_1X128_POW2)
    assert scale.view(torch.int32).tolist() == [[0x7FC00000]]


@formats(*FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_number_spoils_its_block_and_no_other(bad: float, format: BlockFormat) -> None:
    x = torch.ones(300, 300)
    x[130, 140] = bad
    inside = torch.zeros(300, 300, dtype=torch.bool)
    inside[130 if format.rows == 1 else slice(128, 256), 128:256] = True
    value = reference.dequantize(reference.quantize_rowwise(x, format), torch.float32)
    assert torch.equal(value.isnan(), inside)
    assert torch.allclose(value[~inside], torch.tensor(1.0), rtol=2**-4)


# Transpose and dequantize


@formats(BLOCKS_128X128, BLOCKS_128X128_POW2)
@pytest.mark.parametrize("shape", [(130, 300), (1, 129), (0, 5), (3, 130, 300), (2, 128, 1)])
def test_transpose_of_a_square_cast_is_the_cast_of_the_transpose(
    shape: tuple[int, ...], format: BlockFormat, rng: torch.Generator
) -> None:
    x = values("nan", math.prod(shape[:-1]), shape[-1], torch.bfloat16, rng).view(shape)
    got = reference.transpose(reference.quantize_rowwise(x, format))
    want = reference.quantize_rowwise(x.mT, format)
    assert got.format is format
    assert got.data.is_contiguous()
    assert got.scale.stride() == want.scale.stride()
    assert_same(got.data, want.data)
    assert_same(got.scale, want.scale)


@pytest.mark.parametrize("dtype", DTYPES)
@formats(*FORMATS)
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
    got = reference.dequantize(Quantized(data, scale, BLOCKS_1X128), dtype)
    assert_same(got, scale.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [(130, 300), (128, 256), (1, 1), (0, 3), (3, 0)])
def test_dequantize_multiplies_in_fp32_and_rounds_once(
    rows: int, cols: int, dtype: torch.dtype, rng: torch.Generator
) -> None:
    x = values("normal", rows, cols, torch.float32, rng)
    for format in (BLOCKS_1X128, BLOCKS_128X128):
        q = reference.quantize_rowwise(x, format)
        got = reference.dequantize(q, dtype)
        want = torch.empty(rows, cols, dtype=dtype)
        exact = torch.from_numpy(e4m3_values(q.data))
        for i, j in np.ndindex(rows, cols):
            scale = q.scale[i // format.rows, j // format.cols].double()
            want[i, j] = (exact[i, j] * scale).float()
        assert_same(got, want)
