"""Casts of tokens in groups on a GPU: the bytes of the reference."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from blocktensor.ops import formats, reference
from blocktensor.ops.cast import gluon_columnwise, ops, triton_cast
from blocktensor.ops.formats import ACTIVATION_FORMATS, BLOCKS_1X128, BLOCKS_128X128, BlockFormat
from blocktensor.ops.runtime import build_player
from tests.support.groups import drawn, ends, filled, first
from tests.support.numeric import DTYPES, KINDS, assert_same_forms, values

pytestmark = pytest.mark.gpu

CUDA = "cuda"
WIDTHS = (8, 128, 136, 576, 2048, 129, 1)
GLUON, TRITON = gluon_columnwise.casts, triton_cast.casts


def check(
    module: Any,
    x: Tensor,
    sizes: tuple[int, ...],
    format: BlockFormat = BLOCKS_1X128,
    other: BlockFormat | None = None,
) -> None:
    offs = ends(*sizes, device=CUDA)
    formats = format, other or format
    want_row, want_col = reference.quantize_grouped(x.cpu(), offs.cpu(), *formats)
    row, col = module.quantize_grouped(x, offs, *formats)
    row_alone, none = module.quantize_grouped(x, offs, format, None)
    also_none, col_alone = module.quantize_grouped(x, offs, None, formats[1])
    assert none is also_none is None
    for form in (row, row_alone):
        assert form.data.shape == want_row.data.shape
        assert_same_forms(first(form, len(x)), first(want_row, len(x)))
    for form in (col, col_alone):
        assert_same_forms(filled(form, sizes), filled(want_col, sizes))


@pytest.mark.parametrize("module", [GLUON, TRITON], ids=["gluon", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("square", [False, True], ids=["1x128", "128x128"])
def test_any_groups(module: object, dtype: torch.dtype, square: bool) -> None:
    draw = random.Random(0)
    for case in drawn(21, 35, (1,), WIDTHS):
        k = case.k + case.k % 2 if module is GLUON else case.k
        x = torch.randn(case.tokens, k, device=CUDA).to(dtype)
        x[sum(case.sizes) :] = float("nan")  # of no group: in no columnwise block
        rounding: formats.ScaleRounding = draw.choice(("fp32", "power_of_two"))
        other = formats.WEIGHT_FORMATS[rounding] if square else None
        check(module, x, case.sizes, ACTIVATION_FORMATS[rounding], other)


def test_rows_within_a_step_share_a_recording() -> None:
    for rows in (*range(260, 510, 23), 512):
        check(ops, torch.randn(rows, 256, device=CUDA).bfloat16(), (rows - 200, 150))
    player = build_player.player()
    assert player is not None
    plays = player.plays()
    for rows in range(260, 510, 23):
        ops.quantize_grouped(
            torch.randn(rows, 256, device=CUDA).bfloat16(),
            ends(rows - 200, 150, device=CUDA),
            BLOCKS_1X128,
            BLOCKS_1X128,
        )
    assert player.plays() - plays == 11


@pytest.mark.parametrize("kind", KINDS)
def test_any_values(kind: str, rng: Generator) -> None:
    x = values(kind, 300, 264, torch.bfloat16, rng).to(CUDA)
    for module, other in product((GLUON, TRITON), (None, BLOCKS_128X128)):
        check(module, x, (0, 130, 1, 128, 30), other=other)


def test_strided_rows() -> None:
    sizes = 129, 171
    check(ops, torch.randn(300, 600, device=CUDA).bfloat16()[:, 8:520], sizes)
    transposed, offs = torch.randn(512, 300, device=CUDA).bfloat16().t(), ends(*sizes, device=CUDA)
    (_, col), (_, want) = (
        module.quantize_grouped(transposed, offs, None, BLOCKS_1X128) for module in (ops, reference)
    )
    assert_same_forms(filled(col, sizes), filled(want, sizes))


@pytest.mark.parametrize("wrong", [[900, 20, 700], [-5, 300, 100], [2**30, 7, 2**31 - 1]])
@pytest.mark.parametrize("module", [GLUON, TRITON], ids=["gluon", "triton"])
def test_ends_that_decrease_or_lie_beyond_the_tokens(module: Any, wrong: list[int]) -> None:
    x = torch.randn(300, 256, device=CUDA).bfloat16()
    offs = torch.tensor(wrong, dtype=torch.int32, device=CUDA)
    row, _ = module.quantize_grouped(x, offs, BLOCKS_1X128, BLOCKS_1X128)
    torch.cuda.synchronize()  # it does not stop: nothing else is read or written
    assert row.data.shape == (formats.group_rows(300), 256)


@pytest.mark.parametrize("experts", [1, 31, 32, 33, 256, 1000])
def test_many_groups(experts: int) -> None:
    draw = random.Random(experts)
    sizes = tuple(draw.choice((0, 0, 1, 5, 140)) for _ in range(experts)) if experts > 1 else (77,)
    x = torch.randn(sum(sizes) + 3, 128, device=CUDA).bfloat16()
    for module, other in product((GLUON, TRITON), (None, BLOCKS_128X128)):
        check(module, x, sizes, other=other)
