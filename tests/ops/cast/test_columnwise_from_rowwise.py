"""The columnwise form of tokens, derived from their rowwise bytes and power-of-two scales."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor

from blocktensor.ops import reference
from blocktensor.ops.cast import ops
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128_POW2,
    BlockFormat,
    Quantized,
)
from tests.support.casts import kernels
from tests.support.groups import ends, filled
from tests.support.interpreter import interpreted
from tests.support.numeric import KINDS, assert_same_forms, lay_out, values
from tests.support.outliers import KINDS as DISTRIBUTIONS

SHAPES = [(128, 256), (131, 140), (1, 300), (300, 1), (257, 128), (0, 5), (5, 0)]
COLUMNWISE = BLOCKS_1X128_POW2, BLOCKS_128X128_POW2
every_format = pytest.mark.parametrize("format", COLUMNWISE, ids=lambda x: x.name)


def any_bytes(rows: int, cols: int, rng: Generator) -> Quantized:
    """Any data and powers of two, which no cast need have written; one scale is NaN, one Inf."""
    data = torch.randint(256, (rows, cols), generator=rng, dtype=torch.uint8)
    data[rows // 2 :] &= 0x8F  # rows of small numbers, and of zeros
    data[-1:] &= 0x80
    exponents = torch.randint(-126, 120, (rows, -(-cols // 128)), generator=rng)
    scale = torch.exp2(exponents.float())
    scale[-1:] = 2.0**127
    if scale.numel() > 4:
        scale[0, -1], scale[1, 0] = math.nan, math.inf
    return Quantized(data.view(torch.float8_e4m3fn), lay_out(scale, 1), BLOCKS_1X128_POW2)


def by_element(columnwise: Quantized, x: Tensor) -> Tensor:
    """The scale of each element of x, whose columnwise form is given."""
    scale = columnwise.scale.repeat_interleave(columnwise.format.rows, 0)
    return scale.repeat_interleave(128, 1)[: x.shape[1], : x.shape[0]].t()


def check(made: Callable[..., Quantized], x: Quantized, format: BlockFormat) -> None:
    assert_same_forms(made(x, format), reference.columnwise_from_rowwise(x, format))


@every_format
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_it_is_the_direct_cast_of_what_the_bytes_hold(kind: str, format: BlockFormat) -> None:
    """Elements are rounded again only where e4m3 has steps of its smallest numbers."""
    x = DISTRIBUTIONS[kind](Generator().manual_seed(0), 384, 256).bfloat16()
    row = reference.quantize_rowwise(x, BLOCKS_1X128_POW2)
    held = reference.dequantize(row, torch.float32)
    made = reference.columnwise_from_rowwise(row, format)
    assert_same_forms(made, reference.quantize_columnwise(held, format))
    again = reference.dequantize(made, torch.float32)[:, : len(x)].t()
    scale = by_element(made, x)
    normal = held.abs() >= 2**-6 * scale
    assert torch.equal(again[normal], held[normal])
    assert ((again - held).abs() <= 2**-10 * scale).all()
    direct = reference.quantize_columnwise(x, format)
    larger = direct.scale > made.scale
    assert ((direct.scale == made.scale) | (direct.scale == 2 * made.scale)).all()
    assert larger.float().mean() < 0.25
    of_x = reference.dequantize(direct, torch.float32)[:, : len(x)].t()
    normal &= held.abs() > 2**-6 * row.scale.repeat_interleave(128, 1)
    normal &= held.abs() > 2**-6 * by_element(direct, x)
    assert normal.float().mean() > 0.5
    assert torch.equal(of_x[normal], held[normal])


@every_format
def test_groups_are_cast_each_by_itself(format: BlockFormat) -> None:
    sizes = (100, 0, 129, 1)
    x = values("normal", 300, 140, torch.bfloat16, Generator().manual_seed(0))
    row = reference.quantize_rowwise(x, BLOCKS_1X128_POW2)
    row.data.view(torch.uint8)[sum(sizes) :] = 0x7F  # rows of no group are NaN
    made = filled(reference.columnwise_from_rowwise(row, format, ends(*sizes)), sizes)
    first = column = 0
    for size in sizes:
        part = Quantized(row.data[first:][:size], row.scale[first:][:size], row.format)
        own = reference.columnwise_from_rowwise(part, format)
        width, blocks = own.data.shape[1], own.scale.shape[1]
        block = made.data[:, column : column + 128 * blocks].float()
        assert torch.equal(block[:, :width], own.data.float()) and not block[:, width:].any()
        scale = made.scale[:, column // 128 :][:, :blocks]
        assert torch.equal(scale, own.scale)
        first, column = first + size, column + 128 * blocks


@every_format
@interpreted
def test_kernels(format: BlockFormat) -> None:
    rng = Generator().manual_seed(0)
    for i, shape in enumerate(SHAPES):
        x = values(KINDS[i % len(KINDS)], *shape, torch.bfloat16, rng)
        row = reference.quantize_rowwise(x, BLOCKS_1X128_POW2)
        check(kernels("triton").columnwise_from_rowwise, row, format)


@every_format
@interpreted
def test_kernels_of_any_bytes(format: BlockFormat) -> None:
    rng = Generator().manual_seed(1)
    for shape in ((128, 256), (131, 140), (7, 128)):
        x = any_bytes(*shape, rng)
        check(kernels("triton").columnwise_from_rowwise, x, format)
        part = Quantized(x.data[1:, :128], x.scale[1:, :1], x.format)  # of a larger tensor
        check(kernels("triton").columnwise_from_rowwise, part, format)


@every_format
@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((130, 0, 150, 1), (284, 140)),
        ((128, 256), (387, 256)),
        ((0, 0, 5), (8, 140)),
        ((0,), (3, 5)),
    ],
    ids=str,
)
@interpreted
def test_kernels_by_groups(
    sizes: tuple[int, ...], shape: tuple[int, int], format: BlockFormat
) -> None:
    x = values("normal", *shape, torch.bfloat16, Generator().manual_seed(0))
    x[sum(sizes) :] = math.nan
    row = reference.quantize_rowwise(x, BLOCKS_1X128_POW2)
    made, want = (
        filled(module.columnwise_from_rowwise(row, format, ends(*sizes)), sizes)
        for module in (kernels("triton"), reference)
    )
    assert_same_forms(made, want)


@every_format
@interpreted
def test_rows_beyond_the_tokens_are_not_read(format: BlockFormat) -> None:
    """Also where the ends of groups, by mistake, lie beyond the tokens."""
    tokens, x = 270, values("normal", 300, 140, torch.bfloat16, Generator().manual_seed(0))
    x[tokens:] = math.nan
    row = reference.quantize_rowwise(x, BLOCKS_1X128_POW2)
    own = Quantized(row.data[:tokens], row.scale[:tokens], row.format)
    want = reference.columnwise_from_rowwise(own, format, ends(100, 170))
    for module in (kernels("triton"), reference):
        made = module.columnwise_from_rowwise(row, format, ends(100, 190), tokens)
        assert_same_forms(filled(made, (100, 170)), filled(want, (100, 170)))


@pytest.mark.gpu
@every_format
@pytest.mark.parametrize("shape", [(1024, 1536), (300, 576), (4099, 130), (1, 1)], ids=str)
def test_on_a_gpu(shape: tuple[int, int], format: BlockFormat) -> None:
    rng = Generator().manual_seed(2)
    x = values("bits", *shape, torch.bfloat16, rng)
    for row in (reference.quantize_rowwise(x, BLOCKS_1X128_POW2), any_bytes(*shape, rng)):
        on_gpu = Quantized(row.data.cuda(), lay_out(row.scale.cuda(), 1), row.format)
        sizes = shape[0] // 3, 0, shape[0] // 2
        for offs in (None, ends(*sizes)):
            want = reference.columnwise_from_rowwise(row, format, offs)
            made = ops.columnwise_from_rowwise(
                on_gpu, format, None if offs is None else offs.cuda()
            )
            made = Quantized(made.data.cpu(), made.scale.cpu(), format)
            if offs is not None:
                made, want = (filled(each, sizes) for each in (made, want))
            assert_same_forms(made, want)


@pytest.mark.parametrize(
    "formats",
    [(BLOCKS_1X128, BLOCKS_1X128_POW2), (BLOCKS_1X128_POW2, BLOCKS_1X128)],
    ids=["from fp32 scales", "to fp32 scales"],
)
def test_other_scales_would_round_twice(formats: tuple[BlockFormat, BlockFormat]) -> None:
    x: Tensor = torch.ones(4, 128)
    row = reference.quantize_rowwise(x, formats[0])
    with pytest.raises(ValueError, match="do not fit together"):
        ops.columnwise_from_rowwise(row, formats[1], None)
