"""Casts of tokens in groups on a GPU: the bytes of the reference."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from blocktensor.ops import reference
from blocktensor.ops.cast import gluon_columnwise, triton_cast
from blocktensor.ops.cast.ops import quantize_grouped, quantize_grouped_columnwise
from blocktensor.ops.formats import (
    ACTIVATION_FORMATS,
    BLOCKS_1X128,
    BLOCKS_128X128,
    WEIGHT_FORMATS,
    BlockFormat,
    Quantized,
    ScaleRounding,
)
from tests.support.drawn_groups import blocks_of, drawn
from tests.support.groups import ends
from tests.support.numeric import KINDS, assert_same, values

pytestmark = pytest.mark.gpu

CUDA = "cuda"
WIDTHS = (8, 128, 136, 576, 2048, 129, 1)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def assert_same_cast(made: Quantized, wanted: Quantized, blocks: int | None = None) -> None:
    """Equal formats, data and scales; of a columnwise cast, in the blocks that groups fill."""
    assert made.format is wanted.format
    columns = None if blocks is None else blocks * 128
    assert_same(made.data[:, :columns], wanted.data[:, :columns])
    assert_same(made.scale[:, :blocks], wanted.scale[:, :blocks])


def check(
    module: object,
    x: Tensor,
    sizes: tuple[int, ...],
    format: BlockFormat = BLOCKS_1X128,
    other: BlockFormat | None = None,
) -> None:
    """``other``: the format of the columnwise cast."""
    offs, blocks = ends(*sizes, device=CUDA), blocks_of(sizes)
    rowwise, columnwise = (
        Quantized(form.data.to(CUDA), form.scale.to(CUDA), form.format)
        for form in reference.quantize_grouped(x.cpu(), offs.cpu(), format, other)
    )
    row, col = module.quantize_grouped(x, offs, format, other)  # type: ignore[attr-defined]
    assert_same_cast(row, rowwise)
    assert_same_cast(col, columnwise, blocks)
    alone = module.quantize_grouped_columnwise  # type: ignore[attr-defined]
    assert_same_cast(alone(x, offs, other or format), columnwise, blocks)


@pytest.mark.parametrize("module", [gluon_columnwise, triton_cast], ids=lambda m: m.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("square", [False, True], ids=["1x128", "128x128"])
def test_any_groups(module: object, dtype: torch.dtype, square: bool) -> None:
    draw = random.Random(0)
    for case in drawn(21, 35, (1,), WIDTHS):
        k = case.k
        if module is gluon_columnwise and k % 2:
            k += 1
        x = torch.randn(case.tokens, k, device=CUDA).to(dtype)
        x[sum(case.sizes) :] = float("nan")  # of no group: in no columnwise block
        rounding: ScaleRounding = draw.choice(("fp32", "power_of_two"))
        other = WEIGHT_FORMATS[rounding] if square else None
        check(module, x, case.sizes, ACTIVATION_FORMATS[rounding], other)


@pytest.mark.parametrize("kind", KINDS)
def test_any_values(kind: str) -> None:
    rng = torch.Generator().manual_seed(0)
    x = values(kind, 300, 264, torch.bfloat16, rng).to(CUDA)
    for module in (gluon_columnwise, triton_cast):
        for other in (None, BLOCKS_128X128):
            check(module, x, (0, 130, 1, 128, 30), other=other)


def test_strided_rows() -> None:
    wide = torch.randn(300, 600, device=CUDA).bfloat16()
    x = wide[:, 8:520]
    offs = ends(129, 171, device=CUDA)
    row, col = quantize_grouped(x, offs, BLOCKS_1X128)
    rowwise, columnwise = reference.quantize_grouped(x.contiguous(), offs, BLOCKS_1X128)
    assert_same_cast(row, rowwise)
    assert_same_cast(col, columnwise, 4)
    transposed = torch.randn(512, 300, device=CUDA).bfloat16().t()
    col = quantize_grouped_columnwise(transposed, offs, BLOCKS_1X128)
    wanted = reference.quantize_grouped_columnwise(transposed, offs, BLOCKS_1X128)
    assert_same_cast(col, wanted, 4)


@pytest.mark.parametrize("wrong", [[900, 20, 700], [-5, 300, 100], [2**30, 7, 2**31 - 1]])
def test_ends_that_decrease_or_lie_beyond_the_tokens(wrong: list[int]) -> None:
    x = torch.randn(300, 256, device=CUDA).bfloat16()
    offs = torch.tensor(wrong, dtype=torch.int32, device=CUDA)
    for module in (gluon_columnwise, triton_cast):
        row, _ = module.quantize_grouped(x, offs, BLOCKS_1X128)
        torch.cuda.synchronize()  # neither stops: nothing else is read or written
        assert row.data.shape == x.shape


@pytest.mark.parametrize("experts", [1, 31, 32, 33, 256, 1000])
def test_many_groups(experts: int) -> None:
    draw = random.Random(experts)
    sizes = tuple(draw.choice((0, 0, 1, 5, 140)) for _ in range(experts)) if experts > 1 else (77,)
    x = torch.randn(sum(sizes) + 3, 128, device=CUDA).bfloat16()
    for module in (gluon_columnwise, triton_cast):
        for other in (None, BLOCKS_128X128):
            check(module, x, sizes, other=other)
