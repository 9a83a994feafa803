"""Casts of parts: together they give the bytes and scales of the whole matrix's cast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blocktensor.ops import part, reference
from tests.numeric import KINDS, assert_same, values

BF16, FP32 = torch.bfloat16, torch.float32
OPS = torch.ops.blocktensor


def parts_of(
    x: Tensor, row_cuts: list[int], col_cuts: list[int]
) -> list[tuple[Tensor, int, int, Any]]:
    """Pieces of ``x``, how far each begins into its first block, and which blocks it lies in."""
    found = []
    for top, bottom in zip([0, *row_cuts], [*row_cuts, x.shape[-2]], strict=True):
        for left, right in zip([0, *col_cuts], [*col_cuts, x.shape[-1]], strict=True):
            blocks = (
                ...,
                slice(top // 128, -(-bottom // 128)),
                slice(left // 128, -(-right // 128)),
            )
            found.append((x[..., top:bottom, left:right], top % 128, left % 128, blocks))
    return found


def cast_in_parts(x: Tensor, rows: list[int], cols: list[int], power_of_two: bool) -> None:
    """Cut, cast, compare."""
    data, scale = reference.quantize_square(x, power_of_two)
    pieces = [p for p in parts_of(x, rows, cols) if p[0].numel()]
    amax = torch.zeros(scale.shape, dtype=FP32, device=x.device)
    for piece, row, col, blocks in pieces:
        bits = part.part_amax(piece, row, col).view(torch.int32)
        amax[blocks] = torch.maximum(amax[blocks].view(torch.int32), bits).view(FP32)
    assert_same(reference.scale_from_amax(amax, power_of_two), scale)
    whole = [p for p in parts_of(data, rows, cols) if p[0].numel()]
    for (piece, row, col, blocks), (wanted, *_) in zip(pieces, whole, strict=True):
        assert_same(part.quantize_part(piece, amax[blocks], power_of_two, row, col), wanted)


CUTS = ([64], [100, 100], [128], [1, 127, 129, 256], [200, 299])


@pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", "pow2"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=str)
def test_parts_make_the_whole(
    device: torch.device, dtype: torch.dtype, kind: str, power_of_two: bool
) -> None:
    rng = torch.Generator().manual_seed(0)
    x = values(kind, 300, 260, dtype, rng).to(device)
    for cuts in CUTS:
        cast_in_parts(x, cuts, [], power_of_two)
    cast_in_parts(x, [], [130], power_of_two)
    cast_in_parts(x, [77, 200], [65, 128, 200], power_of_two)
    stack = torch.stack([x, x * 2, -x])
    cast_in_parts(stack, [90], [], power_of_two)
    cast_in_parts(x.t(), [90], [31], power_of_two)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 400),
    cols=st.integers(1, 300),
    draw=st.data(),
    power_of_two=st.booleans(),
)
def test_any_cut(rows: int, cols: int, draw: st.DataObject, power_of_two: bool) -> None:
    row_cuts = sorted(draw.draw(st.lists(st.integers(0, rows), max_size=4)))
    col_cuts = sorted(draw.draw(st.lists(st.integers(0, cols), max_size=2)))
    rng = torch.Generator().manual_seed(rows * 1000 + cols)
    cast_in_parts(values("normal", rows, cols, BF16, rng), row_cuts, col_cuts, power_of_two)


@pytest.mark.parametrize("shape", [(130, 300), (1, 1), (2, 5, 140)], ids=str)
def test_opcheck(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    amax = reference.part_amax(x, 100, 3)
    for op, args in (("part_amax", (x, 100, 3)), ("quantize_part", (x, amax, True, 100, 3))):
        passed = torch.library.opcheck(getattr(OPS, op).default, args)
        assert set(passed.values()) == {"SUCCESS"}


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(3, 3, dtype=torch.int32)])
def test_bad_input(bad: Tensor) -> None:
    with pytest.raises((TypeError, ValueError), match="the tensor to quantize"):
        part.part_amax(bad, 0, 0)
    with pytest.raises((TypeError, ValueError), match="the tensor to quantize"):
        part.quantize_part(bad, torch.ones(1, 1), False, 0, 0)
