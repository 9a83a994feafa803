"""Casts of parts: together they give the bytes and scales of the whole matrix's cast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blocktensor.ops import reference
from blocktensor.ops.cast import ops as shard_ops
from blocktensor.ops.formats import (
    BLOCKS_1X128,
    BLOCKS_1X128_POW2,
    BLOCKS_128X128,
    BLOCKS_128X128_POW2,
    BlockFormat,
    ceil_div,
)
from tests.support.numeric import KINDS, assert_same, values

BF16, FP32 = torch.bfloat16, torch.float32
OPS = torch.ops.blocktensor
every_format = pytest.mark.parametrize(
    "format", [BLOCKS_128X128, BLOCKS_128X128_POW2], ids=lambda format: format.name
)


def parts_of(
    x: Tensor, format: BlockFormat, row_cuts: list[int], col_cuts: list[int]
) -> list[tuple[Tensor, int, int, Any]]:
    """Pieces of ``x``, how far each begins into its first block, and which blocks it lies in."""
    rows, cols = format.block_shape
    found = []
    for top, bottom in zip([0, *row_cuts], [*row_cuts, x.shape[-2]], strict=True):
        for left, right in zip([0, *col_cuts], [*col_cuts, x.shape[-1]], strict=True):
            blocks = (
                ...,
                slice(top // rows, ceil_div(bottom, rows)),
                slice(left // cols, ceil_div(right, cols)),
            )
            found.append((x[..., top:bottom, left:right], top % rows, left % cols, blocks))
    return found


def cast_in_parts(
    x: Tensor, rows: list[int], cols: list[int], format: BlockFormat, ops: Any = shard_ops
) -> None:
    """Cut, cast, compare."""
    data, scale, _ = reference.quantize_rowwise(x, format)
    pieces = [p for p in parts_of(x, format, rows, cols) if p[0].numel()]
    amax = torch.zeros(scale.shape, dtype=FP32, device=x.device)
    for piece, row, col, blocks in pieces:
        bits = ops.shard_amax(piece, format, row, col).view(torch.int32)
        amax[blocks] = torch.maximum(amax[blocks].view(torch.int32), bits).view(FP32)
    assert_same(reference.scale_from_amax(amax, format), scale)
    whole = [p for p in parts_of(data, format, rows, cols) if p[0].numel()]
    for (piece, row, col, blocks), (wanted, *_) in zip(pieces, whole, strict=True):
        assert_same(ops.quantize_shard(piece, amax[blocks], format, row, col), wanted)


CUTS = ([64], [100, 100], [128], [1, 127, 129, 256], [200, 299])


@every_format
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=str)
def test_parts_make_the_whole(
    device: torch.device, dtype: torch.dtype, kind: str, format: BlockFormat
) -> None:
    rng = torch.Generator().manual_seed(0)
    x = values(kind, 300, 260, dtype, rng).to(device)
    for cuts in CUTS:
        cast_in_parts(x, cuts, [], format)
    cast_in_parts(x, [], [130], format)
    cast_in_parts(x, [77, 200], [65, 128, 200], format)
    stack = torch.stack([x, x * 2, -x])
    cast_in_parts(stack, [90], [], format)
    cast_in_parts(x.t(), [90], [31], format)


@pytest.mark.parametrize(
    "format",
    [
        BLOCKS_1X128,
        BLOCKS_1X128_POW2,
        BlockFormat("32x64", (32, 64)),
        BlockFormat("1x32", (1, 32), "power_of_two"),
    ],
    ids=lambda format: format.name,
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_takes_parts_in_any_blocks(kind: str, format: BlockFormat) -> None:
    """The kernels are written for weights: for 128x128 blocks."""
    x = values(kind, 300, 260, BF16, torch.Generator().manual_seed(0))
    for cuts in CUTS:
        cast_in_parts(x, cuts, [], format, reference)
    cast_in_parts(x, [77, 200], [65, 128, 200], format, reference)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 400),
    cols=st.integers(1, 300),
    draw=st.data(),
    format=st.sampled_from([BLOCKS_128X128, BLOCKS_128X128_POW2]),
)
def test_any_cut(rows: int, cols: int, draw: st.DataObject, format: BlockFormat) -> None:
    row_cuts = sorted(draw.draw(st.lists(st.integers(0, rows), max_size=4)))
    col_cuts = sorted(draw.draw(st.lists(st.integers(0, cols), max_size=2)))
    rng = torch.Generator().manual_seed(rows * 1000 + cols)
    cast_in_parts(values("normal", rows, cols, BF16, rng), row_cuts, col_cuts, format)
