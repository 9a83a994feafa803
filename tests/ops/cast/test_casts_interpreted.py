"""Casts, transposes and dequantize by Triton kernels, interpreted on the CPU: reference's bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from blocktensor.ops import reference
from blocktensor.ops.formats import (
    ACTIVATION_FORMATS,
    BLOCKS_1X128,
    BLOCKS_128X128,
    CAST_FORMATS,
    WEIGHT_FORMATS,
    BlockFormat,
    Quantized,
)
from tests.support.casts import SQUARE, WAYS, Way, kernels
from tests.support.groups import ends, filled, first
from tests.support.interpreter import interpreted
from tests.support.numeric import (
    DTYPES,
    FORMATS,
    KINDS,
    VIEWS,
    assert_same,
    assert_same_forms,
    lay_out,
    values,
    view_of,
)

SHAPES = [(128, 256), (131, 140), (1, 300), (300, 1), (257, 128), (0, 5), (5, 0)]
# No step of a kernel depends on the rounding of scales and also on the dtype of what is cast.
every_rounding_and_dtype = pytest.mark.parametrize(
    ("dtype", "power_of_two"), [*((dtype, False) for dtype in DTYPES), (torch.bfloat16, True)]
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def check(way: Way, x: Tensor, power_of_two: bool) -> None:
    assert_same_forms(way(kernels("triton"), x, power_of_two), way(reference, x, power_of_two))


@every_rounding_and_dtype
@pytest.mark.parametrize("way", WAYS, ids=str)
@interpreted
def test_casts(way: Way, dtype: torch.dtype, power_of_two: bool) -> None:
    rng = Generator().manual_seed(0)
    turn = WAYS.index(way) + DTYPES.index(dtype)  # another kind of values in each view
    for i, view in enumerate(VIEWS):
        kind, shape = KINDS[(i + turn) % len(KINDS)], SHAPES[i % len(SHAPES)]
        check(way, view_of(view, kind, *shape, dtype, rng), power_of_two)


@every_rounding_and_dtype
@interpreted
def test_stacks(dtype: torch.dtype, power_of_two: bool) -> None:
    x = values("bits", 3 * 130, 140, dtype, Generator().manual_seed(0)).view(3, 130, 140)
    for view in (x, x[1:], x.mT):
        check(SQUARE, view, power_of_two)


@pytest.mark.parametrize(
    ("sizes", "shape", "dtype", "power_of_two"),
    [
        ((130, 0, 150, 1), (284, 140), torch.bfloat16, False),
        ((130, 0, 150, 1), (284, 140), torch.bfloat16, True),
        ((128, 256), (387, 140), torch.float16, False),
        ((0, 0, 5), (8, 140), torch.float32, False),
        ((100, 0, 150), (256, 256), torch.bfloat16, True),
    ],
    ids=str,
)
@interpreted
def test_groups(
    sizes: tuple[int, ...], shape: tuple[int, int], dtype: torch.dtype, power_of_two: bool
) -> None:
    """Some rows belong to no group: they are NaN, and reach no columnwise block."""
    rounding = "power_of_two" if power_of_two else "fp32"
    rows, squares = ACTIVATION_FORMATS[rounding], WEIGHT_FORMATS[rounding]
    x = values("normal", *shape, dtype, Generator().manual_seed(0))
    x[sum(sizes) :] = math.nan
    for formats in ((rows, rows), (rows, squares), (rows, None), (None, squares)):
        made, wanted = (
            module.quantize_grouped(x, ends(*sizes), *formats)
            for module in (kernels("triton"), reference)
        )
        for form, want in (pair for pair in zip(made, wanted, strict=True) if pair[1] is not None):
            cut = (first, len(x)) if want is wanted[0] else (filled, sizes)
            assert_same_forms(*(cut[0](each, cut[1]) for each in (form, want)))


@every_rounding_and_dtype
@interpreted
def test_parts_of_a_matrix(dtype: torch.dtype, power_of_two: bool) -> None:
    """A part that begins and ends inside blocks, whose amax come from all parts."""
    format = WEIGHT_FORMATS["power_of_two" if power_of_two else "fp32"]
    x = values("normal", 300, 140, dtype, Generator().manual_seed(0))
    for row, col in ((0, 0), (100, 0), (0, 5), (100, 37)):
        for part in (x, x.view(2, 150, 140)):
            amax = reference.shard_amax(part, format, row, col)
            assert_same(kernels("triton").shard_amax(part, format, row, col), amax)
            larger = 2 * amax
            larger[..., 0, 0] = math.copysign(math.nan, -1)  # of another part
            assert_same(
                kernels("triton").quantize_shard(part, larger, format, row, col),
                reference.quantize_shard(part, larger, format, row, col),
            )


@interpreted
def test_kernels_round_scales_as_every_format_says_that_they_write() -> None:
    x = values("normal", 130, 300, torch.bfloat16, Generator().manual_seed(0))
    for format in CAST_FORMATS:
        wanted = reference.quantize_rowwise(x, format)
        assert_same_forms(kernels("triton").quantize_rowwise(x, format), wanted)


def any_cast(shape: tuple[int, ...], format: BlockFormat, rng: Generator) -> Quantized:
    """Any bytes and scales; some scales are NaN or Inf."""
    data = torch.randint(256, shape, generator=rng, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.exp2(torch.randint(-40, 40, format.scale_shape(shape), generator=rng))
    scale[..., 0, -1], scale[..., -1, 0] = math.nan, math.inf
    return Quantized(data, scale if len(shape) > 2 else lay_out(scale, format.rows), format)


@pytest.mark.parametrize("shape", [(128, 256), (131, 300), (3, 130, 140), (1, 1)], ids=str)
@interpreted
def test_transpose(shape: tuple[int, ...]) -> None:
    x = any_cast(shape, BLOCKS_128X128, Generator().manual_seed(0))
    for given in (x, x._replace(data=x.data.mT.contiguous().mT)):
        assert_same_forms(kernels("triton").transpose(given), reference.transpose(given))


@every_dtype
@pytest.mark.parametrize("format", [BLOCKS_1X128, BLOCKS_128X128], ids=lambda x: x.name)
@interpreted
def test_dequantize(format: BlockFormat, dtype: torch.dtype) -> None:
    rng = Generator().manual_seed(0)
    given: list[Any] = [any_cast(shape, format, rng) for shape in ((131, 300), (33, 128), (1, 1))]
    if format.transposes:
        given.append(any_cast((3, 130, 140), format, rng))
        given.append(Quantized(given[-1].data[:, :, :1], given[-1].scale[:, :, :1], format))
    largest = torch.tensor([[65504.0, 3.0, -65000.0]]).half()  # rounds up beyond fp16
    given.append(reference.quantize_rowwise(largest, FORMATS[format.rows]))
    for x in given:
        assert_same(kernels("triton").dequantize(x, dtype), reference.dequantize(x, dtype))
