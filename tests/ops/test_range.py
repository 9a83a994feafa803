"""The range of numbers that docs/design/numbers.md states for casts and GEMMs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktensor import BlockwiseFP8Weight, Recipe, functional, quantize
from blocktensor.ops.formats import BLOCK
from tests.support.numeric import relative_error

PAGE = (Path(__file__).parents[2] / "docs/design/numbers.md").read_text("utf-8")
SECTION = PAGE.partition("## Range")[2].partition("\n## ")[0]
LARGEST, PRODUCT, SMALLEST = (
    float(number)
    for number in re.findall(r"at (?:most|least) ([\d.]+e-?\d+) \(", SECTION.replace("\n  ", " "))
)
FP32 = torch.finfo(torch.float32)
scales = pytest.mark.parametrize(
    ("scale", "error"),  # of a matmul of equal numbers, whose casts are exact with fp32 scales
    [("fp32", 1e-3), ("power_of_two", 2**-3)],
)


def test_the_numbers_of_the_page() -> None:
    assert FP32.max / (448 * BLOCK) * 0.98 < LARGEST < FP32.max / (448 * BLOCK)
    assert 448**2 * FP32.tiny < PRODUCT < 1.02 * 448**2 * FP32.tiny
    assert 448 * FP32.tiny < SMALLEST < 1.02 * 448 * FP32.tiny


def matmul(x: float, w: float, scale: Any) -> tuple[Tensor, float]:
    """A linear layer of equal numbers over one block of K, and what each output should be."""
    recipe = Recipe(scale=scale)
    weight = BlockwiseFP8Weight(torch.full((BLOCK, BLOCK), w), recipe)
    made = functional.linear(torch.full((3, BLOCK), x), weight)
    return made, BLOCK * x * w


@scales
def test_no_output_overflows_in_the_range(scale: Any, error: float) -> None:
    for x, w in ((LARGEST, 1e-6), (LARGEST, 400.0), (LARGEST, LARGEST * 1e-33), (1e-6, LARGEST)):
        made, want = matmul(x, w, scale)
        assert want < FP32.max
        assert relative_error(made, torch.full_like(made, want)) < error
    # the product itself is beyond fp32
    assert matmul(LARGEST, LARGEST, scale)[0].isinf().all()


def test_an_output_may_overflow_beyond_the_range() -> None:
    made, want = matmul(1e36, 1e-6, "fp32")
    assert want < FP32.max and made.isinf().all()
    assert matmul(1.02 * LARGEST, 1e-6, "fp32")[0].isinf().all()


@scales
def test_small_products_keep_their_bits_in_the_range(scale: Any, error: float) -> None:
    for x in (PRODUCT**0.5, PRODUCT, 1.0, 1e3):
        made, want = matmul(x, PRODUCT / x, scale)
        assert relative_error(made, torch.full_like(made, want)) < error


def test_small_blocks_keep_their_bits_in_the_range() -> None:
    steps = torch.linspace(0.5, 1, BLOCK)
    for recipe in (Recipe(), Recipe(scale="power_of_two")):
        for amax in (SMALLEST, 1.5 * SMALLEST, 1e-30):
            x = (amax * steps)[None]
            assert relative_error(quantize(x, recipe).dequantize(), x) < 2**-4
    below = (1.4 * 448 * 2**-149 * steps)[None]  # its scale is the smallest number
    assert relative_error(quantize(below).dequantize(), below) > 0.1
