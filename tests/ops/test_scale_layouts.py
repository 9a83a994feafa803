"""Layouts of data and of scales, and what cuBLAS and TMA are handed of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    BlockFormat,
    Quantized,
)
from blocktensor.ops.scale_layouts import (
    columnwise_width,
    copy_data_,
    cublas_scale,
    empty_columnwise,
    empty_quantized,
    empty_scale,
    in_vectors,
    laid_out,
    pad4,
    tma_scale,
)
from tests.support.numeric import E4M3, assert_same, operand

CPU = torch.device("cpu")


def filled(scale: Tensor) -> Tensor:
    """``scale`` with a different number in each place."""
    return scale.copy_(torch.arange(1.0, scale.numel() + 1).view(scale.shape))


@pytest.mark.parametrize(
    ("size", "padded"), [(0, 0), (1, 4), (4, 4), (5, 8), (128, 128), (129, 132), (300, 300)]
)
def test_sizes(size: int, padded: int) -> None:
    assert pad4(size) == padded


@pytest.mark.parametrize(
    ("rows", "cols", "shape", "stride"),
    [
        (300, 300, (300, 3), (1, 300)),
        (129, 128, (129, 1), (1, 132)),
        (1, 257, (1, 3), (1, 4)),
        (0, 128, (0, 1), (1, 1)),
        (5, 0, (5, 0), (1, 8)),
    ],
)
def test_rowwise_scales_are_column_major(
    rows: int, cols: int, shape: tuple[int, int], stride: tuple[int, int]
) -> None:
    scale = empty_scale((rows, cols), BLOCKS_1X128, CPU)
    assert (scale.shape, scale.dtype) == (shape, torch.float32)
    if 0 not in shape:
        assert scale.stride() == stride


@pytest.mark.parametrize(
    ("shape", "scale_shape", "stride"),
    [
        ((300, 300), (3, 3), (4, 1)),
        ((128, 640), (1, 5), (8, 1)),
        ((1, 1), (1, 1), (4, 1)),
        ((2, 129, 512), (2, 2, 4), (8, 4, 1)),
        ((2, 129, 513), (2, 2, 5), (16, 8, 1)),
    ],
)
def test_square_scales_are_row_major(
    shape: tuple[int, ...], scale_shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    scale = empty_scale(shape, BLOCKS_128X128, CPU)
    assert (scale.shape, scale.stride(), scale.dtype) == (scale_shape, stride, torch.float32)


def test_the_rounding_of_scales_changes_no_layout() -> None:
    for fp32, power_of_two in (
        (BLOCKS_1X128, BLOCKS_1X128_POW2),
        (BLOCKS_128X128, BLOCKS_128X128_POW2),
    ):
        a, b = (empty_scale((129, 300), format, CPU) for format in (fp32, power_of_two))
        assert (a.shape, a.stride()) == (b.shape, b.stride())


@pytest.mark.parametrize(
    ("shape", "format"),
    [
        ((129, 300), BLOCKS_1X128),
        ((129, 300), BLOCKS_128X128),
        ((2, 129, 300), BLOCKS_128X128_POW2),
    ],
)
def test_data_comes_with_its_scales(shape: tuple[int, ...], format: BlockFormat) -> None:
    made = empty_quantized(shape, format, CPU)
    assert made.format is format
    assert (made.data.shape, made.data.dtype, made.data.is_contiguous()) == (shape, E4M3, True)
    scale = empty_scale(shape, format, CPU)
    assert (made.scale.shape, made.scale.stride()) == (scale.shape, scale.stride())


@pytest.mark.parametrize(
    ("tokens", "width"),
    [(0, 0), (1, 16), (15, 16), (16, 16), (127, 128), (128, 128), (129, 144), (4095, 4096)],
)
def test_columnwise_casts_have_rows_of_whole_vectors(tokens: int, width: int) -> None:
    x = torch.empty(tokens, 3)
    for format in (BLOCKS_1X128, BLOCKS_128X128_POW2, BlockFormat("1x32", (1, 32))):
        assert columnwise_width(tokens, format) == width
        made, wanted = empty_columnwise(x, format), empty_quantized((3, width), format, CPU)
        assert (made.data.shape, made.data.stride()) == (wanted.data.shape, wanted.data.stride())
        assert made.scale.shape == format.scale_shape((3, tokens))  # the zeros need no more blocks
        assert made.scale.stride() == wanted.scale.stride()
    assert columnwise_width(tokens, BlockFormat("1x50", (1, 50))) == tokens


@pytest.mark.parametrize(("of_target", "of_source"), [(127, 128), (128, 127), (128, 128)])
def test_copies_between_widths_leave_zeros_after_the_data(of_target: int, of_source: int) -> None:
    source = torch.rand(3, 128)
    source[:, 127] = 0
    target = torch.empty(3, of_target, dtype=E4M3)  # NaN in tests
    copy_data_(target, source[:, :of_source].to(E4M3))
    assert_same(target, source[:, :of_target].to(E4M3))


def test_scales_are_laid_out_once() -> None:
    data, scale, _ = operand(5, 300, 1, torch.Generator().manual_seed(0))
    same = laid_out(data, scale, BLOCKS_1X128)
    assert same.data is data
    assert same.scale is scale
    copy = laid_out(data, scale.contiguous(), BLOCKS_1X128)
    assert copy.format is BLOCKS_1X128
    assert copy.scale.stride() == empty_scale((5, 300), BLOCKS_1X128, CPU).stride()
    assert_same(copy.scale, scale)
    stack = torch.zeros(2, 129, 300).to(E4M3)
    scale = torch.rand(2, 2, 3)
    copy = laid_out(stack, scale, BLOCKS_128X128)
    assert copy.scale.stride() == empty_scale(stack.shape, BLOCKS_128X128, CPU).stride()
    assert_same(copy.scale, scale)


# For cuBLAS


def quantized(scale: Tensor, rows: int, cols: int, format: BlockFormat) -> Quantized:
    """An operand with these scales; its data is never looked at."""
    return Quantized(torch.empty((rows, cols), dtype=E4M3, device="meta"), scale, format)


@pytest.mark.parametrize("rows", [1, 3, 4, 128, 129, 132])
@pytest.mark.parametrize("cols", [1, 128, 129, 1000])
def test_rowwise_scales_for_cublas(rows: int, cols: int) -> None:
    scale = filled(empty_scale((rows, cols), BLOCKS_1X128, CPU))
    given = cublas_scale(quantized(scale, rows, cols, BLOCKS_1X128))
    assert given.stride() == (1, rows)
    assert torch.equal(given, scale)
    assert (given.data_ptr() == scale.data_ptr()) == (rows % 4 == 0)


@pytest.mark.parametrize("rows", [1, 128, 129, 513])
@pytest.mark.parametrize("cols", [1, 128, 512, 513, 1000])
def test_square_scales_for_cublas(rows: int, cols: int) -> None:
    scale = filled(empty_scale((rows, cols), BLOCKS_128X128, CPU))
    given = cublas_scale(quantized(scale, rows, cols, BLOCKS_128X128))
    n_rows, n_cols = scale.shape
    assert given.shape == (pad4(n_cols), n_rows)
    assert given.stride() == (1, pad4(n_cols))
    assert torch.equal(given[:n_cols].t(), scale)
    assert given.data_ptr() == scale.data_ptr()


@pytest.mark.parametrize(
    "part",
    [
        [slice(1, 3)],
        [..., slice(1, 4)],
        [..., slice(4)],
        [2],
        [..., slice(5, 6)],
        [..., slice(1, 6)],
    ],
)
@pytest.mark.parametrize("layout", ["ours", "dense", "transposed"])
def test_slices_of_square_scales_for_cublas(part: list[slice], layout: str) -> None:
    """Whatever view comes in: right values, readable to the end, no view past the storage."""
    scale = filled(empty_scale((512, 768), BLOCKS_128X128, CPU))  # [4, 6], padded to 8
    if layout == "dense":
        scale = scale.contiguous()
    if layout == "transposed":
        scale = scale.t().contiguous().t()
    scale = scale[tuple(part)]
    scale = scale if scale.ndim == 2 else scale[None]
    n_rows, n_cols = scale.shape
    given = cublas_scale(quantized(scale, 128 * n_rows, 128 * n_cols, BLOCKS_128X128))
    assert given.stride() == (1, pad4(n_cols))
    assert torch.equal(given[:n_cols].t(), scale)
    if given.untyped_storage().data_ptr() != scale.untyped_storage().data_ptr():
        assert (given[n_cols:] == 0).all()
    end = given.storage_offset() + math.prod(given.shape)
    assert end * 4 <= given.untyped_storage().nbytes()


# For TMA


@pytest.mark.parametrize("shape", [(1, 1), (3, 300), (128, 128), (129, 1000), (513, 513)])
@pytest.mark.parametrize("format", [BLOCKS_1X128, BLOCKS_128X128], ids=lambda format: format.name)
def test_our_own_scales_are_read_by_tma_where_they_lie(
    shape: tuple[int, int], format: BlockFormat
) -> None:
    scale = filled(empty_scale(shape, format, CPU))
    assert tma_scale(quantized(scale, *shape, format)) is scale


@pytest.mark.parametrize("format", [BLOCKS_1X128, BLOCKS_128X128], ids=lambda format: format.name)
@pytest.mark.parametrize(
    "layout", ["dense", "transposed", "unaligned", "repeated", "overlapping", "sliced"]
)
def test_other_scales_are_copied_for_tma(layout: str, format: BlockFormat) -> None:
    shape = (513, 646)  # scales [513, 6] or [5, 6]
    ours = empty_scale(shape, format, CPU)
    scale = filled(torch.empty(ours.shape))
    if layout == "transposed":
        scale = scale.t().contiguous().t()
    if layout == "unaligned":
        flat = torch.empty(1 + 6 * pad4(513))[1:]
        scale = flat.as_strided(ours.shape, ours.stride()).copy_(scale)
    if layout == "repeated":
        scale = scale[:1, :1].expand(ours.shape)
    if layout == "overlapping":  # lines 16 bytes apart, and longer than that
        strides = (1, 4) if format is BLOCKS_1X128 else (4, 1)
        scale = torch.arange(1.0, 1000.0).as_strided(ours.shape, strides)
    if layout == "sliced":  # lines as far apart as ours, the first of them unaligned
        wide = empty_scale((513 + 128, 646 + 128), format, CPU)
        scale = (
            wide[1:514, :6].copy_(scale) if format is BLOCKS_1X128 else wide[:5, 1:].copy_(scale)
        )
    given = tma_scale(quantized(scale, *shape, format))
    assert given.stride() == ours.stride()
    assert given.data_ptr() % 16 == 0
    assert torch.equal(given, scale)


def test_aligned_slices_are_read_by_tma_where_they_lie() -> None:
    rowwise = filled(empty_scale((520, 768), BLOCKS_1X128, CPU))[4:260, 1:3]
    assert tma_scale(quantized(rowwise, 256, 256, BLOCKS_1X128)) is rowwise
    square = filled(empty_scale((512, 1024), BLOCKS_128X128, CPU))[1:3, 4:7]
    assert tma_scale(quantized(square, 256, 384, BLOCKS_128X128)) is square


# Data


@pytest.mark.parametrize("k", [0, 1, 15, 16, 17, 128, 130])
def test_rows_of_whole_vectors(k: int) -> None:
    data = torch.arange(3 * k).remainder(100).float().view(3, k).to(E4M3)
    given = in_vectors(data)
    assert given.is_contiguous()
    assert given.shape == (3, -(-k // 16) * 16)
    assert given.data_ptr() % 16 == 0
    assert_same(given[:, :k], data)
    assert (given.view(torch.uint8)[:, k:] == 0).all()
    assert (given is data) == (k % 16 == 0)


def test_unaligned_data_is_copied() -> None:
    data = torch.rand(3 * 16 + 8).to(E4M3)[8:].view(3, 16)
    given = in_vectors(data)
    assert given.data_ptr() % 16 == 0
    assert_same(given, data)
