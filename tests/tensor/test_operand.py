"""The form of a matrix in square blocks that is derived from the other, and whether it is kept."""

from __future__ import annotations

import pytest
import torch

from blocktensor import BlockwiseFP8Tensor, Recipe
from tests.support.models import SQUARE, assert_same_bytes, inner, quantized, randn


@pytest.mark.parametrize("shape", [(200, 300), (3, 200, 130)])
@pytest.mark.parametrize("policy", ["on_demand", "keep"])
def test_columnwise_of_128x128_is_the_exact_transpose(
    policy: str, shape: tuple[int, ...], device: torch.device
) -> None:
    fp8 = quantized(*shape, block=SQUARE, device=device, recipe=Recipe(columnwise=policy))
    first, second = fp8.columnwise(), fp8.columnwise()
    for derived in (first, second):
        assert derived.data.is_contiguous()
        assert_same_bytes(derived.data, fp8.rowwise_data.mT)
        assert_same_bytes(derived.scale, fp8.rowwise_scale.mT)
    recast = BlockwiseFP8Tensor.quantize(randn(*shape, device=device).mT.contiguous(), SQUARE)
    assert_same_bytes(first.data, recast.rowwise_data)
    assert_same_bytes(first.scale, recast.rowwise_scale)
    if policy == "keep":
        assert fp8.columnwise_data is first.data is second.data
        assert fp8.columnwise_scale is first.scale
    else:
        assert first.data.data_ptr() != second.data.data_ptr()
        assert inner(fp8).keys() == {"rowwise_data", "rowwise_scale"}


@pytest.mark.parametrize("policy", ["on_demand", "keep"])
def test_rowwise_of_a_transpose_is_derived_too(policy: str) -> None:
    fp8 = quantized(200, 300, block=SQUARE, recipe=Recipe(columnwise=policy)).t()
    assert inner(fp8).keys() == {"columnwise_data", "columnwise_scale"}
    assert_same_bytes(fp8.rowwise().data, fp8.columnwise_data.t())
    assert (fp8.rowwise_data is not None) == (policy == "keep")
