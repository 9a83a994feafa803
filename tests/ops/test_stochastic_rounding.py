"""The cast that rounds at random: between neighbors, right on average, repeatable."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocktensor.ops import reference
from blocktensor.ops.formats import BLOCKS_128X128, BLOCKS_128X128_POW2, BlockFormat, Quantized
from tests.support.models import randn
from tests.support.numeric import assert_same

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
NUMBERS = E4M3[E4M3.isfinite()].unique()
DRAWS = 2000
every_format = pytest.mark.parametrize(
    "format", [BLOCKS_128X128, BLOCKS_128X128_POW2], ids=lambda format: format.name
)


def noise(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rounded(x: Tensor, seed: int = 7) -> Tensor:
    return reference.round_stochastically(x, BLOCKS_128X128, noise(seed)).float()


def test_numbers_of_the_format_stay() -> None:
    assert torch.equal(rounded(NUMBERS), NUMBERS)
    assert torch.equal(rounded(torch.tensor([-0.0])).signbit(), torch.tensor([True]))


def test_values_become_a_neighbor_with_the_right_probability() -> None:
    """Of both signs, in every binade, at its ends, among subnormal numbers and below them."""
    pairs = torch.stack([NUMBERS[:-1], NUMBERS[1:]])
    for share in (0.001, 0.25, 0.9):
        x = pairs[0] + share * (pairs[1] - pairs[0])
        made = torch.stack([rounded(x, seed) for seed in range(DRAWS)])
        assert ((made == pairs[0]) | (made == pairs[1])).all()
        upper = (made == pairs[1]).float().mean(0)
        assert (upper - share).abs().max() < 5 * (share * (1 - share) / DRAWS) ** 0.5 + 1e-3


def test_what_the_format_cannot_hold() -> None:
    x = torch.tensor([449.0, -1e9, float("inf"), float("-inf"), float("nan")])
    assert_same(rounded(x), torch.tensor([448.0, -448, 448, -448, float("nan")]))


def cast(x: Tensor, format: BlockFormat, seed: int = 7, scale: Tensor | None = None) -> Quantized:
    return reference.quantize_stochastically(x, format, noise(seed), scale)


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_expected_value_is_the_input(format: BlockFormat, dtype: torch.dtype) -> None:
    x = randn(200, 130, dtype=dtype)
    made = torch.stack(
        [reference.dequantize(cast(x, format, seed), torch.float32) for seed in range(300)]
    )
    step = x.float().abs() / 8 + x.abs().max().float() / 2**15
    assert ((made - x.float()).abs() <= step).all()
    error = made.mean(0) - x.float()
    assert error.abs().max() < 0.3 * x.abs().max() / 16  # 5 standard deviations of the mean
    assert error.mean().abs() < 1e-4
    plain = reference.quantize_rowwise(x, format)
    assert_same(cast(x, format).scale, plain.scale)
    assert cast(x, format).scale.stride() == plain.scale.stride()


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cast_that_is_cast_again_stays(format: BlockFormat, dtype: torch.dtype) -> None:
    first = reference.quantize_rowwise(randn(3, 200, 130, dtype=dtype), format)
    again = cast(reference.dequantize(first, dtype), format, scale=first.scale)
    assert_same(again.data, first.data)
    assert_same(again.scale, first.scale)


def test_a_scale_is_kept_while_it_fits() -> None:
    x = randn(128, 384, dtype=torch.float32)
    old = reference.quantize_rowwise(x, BLOCKS_128X128).scale
    x[:, 128:256] *= 1.001
    x[:, 256:] *= 1.5
    assert_same(cast(x, BLOCKS_128X128, scale=old).scale[:, :2], old[:, :2])
    own = reference.quantize_rowwise(x, BLOCKS_128X128).scale
    assert_same(cast(x, BLOCKS_128X128, scale=old).scale[:, 2:], own[:, 2:])
    assert_same(cast(x / 4, BLOCKS_128X128, scale=old).scale, own / 4)


def test_a_block_with_a_nan_or_an_inf_is_nan_and_no_other() -> None:
    x = randn(256, 256, dtype=torch.float32)
    x[3, 4], x[200, 200] = float("nan"), float("inf")
    made = reference.dequantize(cast(x, BLOCKS_128X128), torch.float32)
    assert made[:128, :128].isnan().all()
    assert made[128:, 128:].isnan().all()
    assert made[:128, 128:].isfinite().all()


def test_the_seed_alone_decides() -> None:
    x = randn(130, 130, dtype=torch.float32)
    a, b, c = (cast(x, BLOCKS_128X128, seed) for seed in (1, 1, 2))
    assert_same(a.data, b.data)
    assert not torch.equal(a.data.float(), c.data.float())
