"""Casts to the grid of MXFP4: the reference against a search of the grid, kernels against it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from blocktensor.checkpoint.mxfp4 import VALUES
from blocktensor.ops import reference
from blocktensor.ops.cast import ops
from blocktensor.ops.formats import BLOCKS_128X128_POW2, GRID_FORMATS, BlockFormat
from tests.support.casts import kernels
from tests.support.interpreter import interpreted
from tests.support.numeric import DTYPES, KINDS, assert_same, assert_same_forms, values

NK, KN = GRID_FORMATS["mxfp4"], GRID_FORMATS["mxfp4_kn"]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
MAGNITUDES = np.array(VALUES[:8])


def nearest(group: np.ndarray) -> np.ndarray:
    """The nearest values of the grid, in fp64; to an even code at ties."""
    if not np.isfinite(group).all():
        return np.full_like(group, math.nan)
    amax = np.abs(group).max(initial=0.0)
    exponent = next(e for e in range(-127, 126) if amax <= 6 * 2.0**e or e == 125)
    numbers = np.abs(group)[:, None] / 2.0**exponent
    distance = np.abs(numbers - MAGNITUDES)
    is_nearest = distance == distance.min(1, keepdims=True)
    even_first = np.where(np.arange(8) % 2 == 0, 0, 1)
    codes = np.where(is_nearest, even_first, 2).argmin(1)
    return np.copysign(MAGNITUDES[codes] * 2.0**exponent, group)


def by_search(x: Tensor) -> Tensor:
    """The grid of rows, group by group."""
    flat = x.double().numpy().reshape(-1, x.shape[-1])
    rows = [
        np.concatenate([nearest(row[i : i + 32]) for i in range(0, len(row), 32)])
        if len(row)
        else row
        for row in flat
    ]
    return torch.from_numpy(np.array(rows).reshape(x.shape)).float()


def inputs(dtype: torch.dtype, rng: Generator) -> Tensor:
    """Ties, all magnitudes of the dtype, zeros of both signs, NaN and Inf in some groups."""
    x = values("normal", 68, 200, torch.float32, rng)
    x *= torch.exp2(torch.randint(-130, 120, (68, 1), generator=rng).float())
    x[:8] = torch.arange(200) / 16 - 5  # ties of every kind
    x[8:16, :64], x[8:12, 64:] = 0.0, -0.0
    x[20, 40], x[21, 199], x[22, 0] = math.nan, math.inf, -math.inf
    x[23], x[24], x[25, :] = 2.0**-128, 2.0**-149, torch.finfo(torch.float32).max
    x = x.to(dtype)
    return torch.where(x.isinf() & (torch.arange(68)[:, None] > 22), torch.zeros_like(x), x)


@every_dtype
def test_the_grid_is_the_nearest_one(dtype: torch.dtype, rng: Generator) -> None:
    x = inputs(dtype, rng)
    made = reference.on_mxfp4_grid(x, (1, 32))
    assert_same(made, by_search(x))
    assert_same(reference.on_mxfp4_grid(made, (1, 32)), made)
    assert_same(reference.on_mxfp4_grid(x.t(), (32, 1)), made.t())
    for kind in KINDS:
        some = values(kind, 33, 70, dtype, rng)
        assert_same(reference.on_mxfp4_grid(some, (1, 32)), by_search(some))


@pytest.mark.parametrize("shape", [(0, 40), (40, 0), (1, 1), (127, 129), (576, 33), (2, 130, 70)])
def test_casts_are_casts_of_values_on_the_grid(shape: tuple[int, ...], rng: Generator) -> None:
    x = torch.randn(shape, generator=rng)
    for format, group in ((NK, (1, 32)), (KN, (32, 1))):
        made = ops.quantize_rowwise(x, format)
        on_grid = reference.on_mxfp4_grid(x, group)
        assert_same_forms(made, ops.quantize_rowwise(on_grid, BLOCKS_128X128_POW2))
        assert made.format is format.stored is BLOCKS_128X128_POW2
        turned = ops.transpose(made)
        assert_same_forms(ops.quantize_transpose(x, format), turned)
        assert_same_forms(ops.quantize_transpose(x.mT.contiguous().mT, format), turned)
        assert_same_forms(ops.quantize_rowwise(x.mT, format.of_transpose), turned)
        for got, want in zip(ops.quantize_with_transpose(x, format), (made, turned), strict=True):
            assert_same_forms(got, want)
    with pytest.raises(ValueError, match="do not fit together"):
        ops.quantize_columnwise(torch.randn(4, 4), NK)


def test_ops_of_graphs_have_the_stored_format(rng: Generator) -> None:
    x = torch.randn(130, 96, generator=rng)
    compiled = torch.compile(lambda x: ops.quantize_with_transpose(x, NK), fullgraph=True)
    for got, want in zip(compiled(x), ops.quantize_with_transpose(x, NK), strict=True):
        assert_same_forms(got, want)


@pytest.mark.parametrize("format", [NK, KN], ids=lambda format: format.name)
def test_parts_have_the_bytes_of_the_whole(format: BlockFormat, rng: Generator) -> None:
    x = torch.randn(300, 160, generator=rng)
    whole = ops.quantize_rowwise(x, format)
    amax = reference.shard_amax(x, format, 0, 0)
    for rows, cols in ((slice(64, 224), slice(0, 160)), (slice(0, 300), slice(32, 160))):
        part, row, col = x[rows, cols], rows.start % 128, cols.start % 128
        blocks = amax[rows.start // 128 : -(-rows.stop // 128), cols.start // 128 :]
        own = ops.shard_amax(part, format, row, col)
        assert (own <= blocks).all()
        data = ops.quantize_shard(part, blocks, format, row, col, own)
        assert_same(data, whole.data[rows, cols])


@every_dtype
@interpreted
def test_kernels(dtype: torch.dtype) -> None:
    rng = Generator().manual_seed(0)
    x = inputs(dtype, rng)
    for format in (NK, KN):
        for view in (x, x.mT, x[:65, 3:], x.view(2, 34, 200)):
            made = kernels("triton").quantize_rowwise(view, format)
            assert_same_forms(made, reference.quantize_rowwise(view, format))
        rows, cols = (32, 0) if format is KN else (5, 64)
        amax = reference.shard_amax(x, format, rows, cols)
        assert_same(kernels("triton").shard_amax(x, format, rows, cols), amax)
        larger = 2 * amax
        assert_same(
            kernels("triton").quantize_shard(x, larger, format, rows, cols),
            reference.quantize_shard(x, larger, format, rows, cols),
        )
