"""Strides and padding of scales, and what cuBLAS is handed of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from blocktensor.ops import layouts

CPU = torch.device("cpu")


def filled(scale: Tensor) -> Tensor:
    """``scale`` with a different number in each place."""
    return scale.copy_(torch.arange(1.0, scale.numel() + 1).view(scale.shape))


@pytest.mark.parametrize(
    ("size", "blocks", "padded"),
    [(0, 0, 0), (1, 1, 4), (4, 1, 4), (5, 1, 8), (128, 1, 128), (129, 2, 132), (300, 3, 300)],
)
def test_sizes(size: int, blocks: int, padded: int) -> None:
    assert layouts.num_blocks(size) == blocks
    assert layouts.pad4(size) == padded


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
    scale = layouts.empty_rowwise_scale(rows, cols, CPU)
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
    scale = layouts.empty_square_scale(shape, CPU)
    assert (scale.shape, scale.stride(), scale.dtype) == (scale_shape, stride, torch.float32)
    assert layouts.square_scale_shape(shape) == scale_shape


@pytest.mark.parametrize("rows", [1, 2, 127, 128, 129, 256])
def test_the_kind_of_a_scale_shows_in_its_shape(rows: int) -> None:
    assert layouts.rows_per_scale(rows, layouts.empty_rowwise_scale(rows, 300, CPU)) == 1
    if rows > 1:
        assert layouts.rows_per_scale(rows, layouts.empty_square_scale((rows, 300), CPU)) == 128


@pytest.mark.parametrize("rows", [1, 3, 4, 128, 129, 132])
@pytest.mark.parametrize("cols", [1, 128, 129, 1000])
def test_rowwise_scales_for_cublas(rows: int, cols: int) -> None:
    scale = filled(layouts.empty_rowwise_scale(rows, cols, CPU))
    given = layouts.cublas_rowwise_scale(scale)
    assert given.stride() == (1, rows)
    assert torch.equal(given, scale)
    assert (given.data_ptr() == scale.data_ptr()) == (rows % 4 == 0)


@pytest.mark.parametrize("rows", [1, 128, 129, 513])
@pytest.mark.parametrize("cols", [1, 128, 512, 513, 1000])
def test_square_scales_for_cublas(rows: int, cols: int) -> None:
    scale = filled(layouts.empty_square_scale((rows, cols), CPU))
    given = layouts.cublas_square_scale(scale)
    n_rows, n_cols = scale.shape
    assert given.shape == (layouts.pad4(n_cols), n_rows)
    assert given.stride() == (1, layouts.pad4(n_cols))
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
    scale = filled(layouts.empty_square_scale((512, 768), CPU))  # [4, 6], padded to 8
    if layout == "dense":
        scale = scale.contiguous()
    if layout == "transposed":
        scale = scale.t().contiguous().t()
    scale = scale[tuple(part)]
    scale = scale if scale.ndim == 2 else scale[None]
    given = layouts.cublas_square_scale(scale)
    n_cols = scale.shape[1]
    assert given.stride() == (1, layouts.pad4(n_cols))
    assert torch.equal(given[:n_cols].t(), scale)
    if given.untyped_storage().data_ptr() != scale.untyped_storage().data_ptr():
        assert (given[n_cols:] == 0).all()
    end = given.storage_offset() + math.prod(given.shape)
    assert end * 4 <= given.untyped_storage().nbytes()
