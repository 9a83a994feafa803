"""The fixture that fills fresh memory with NaN, for every way this package allocates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blocktensor.ops.formats import BLOCKS_1X128, BLOCKS_128X128
from blocktensor.ops.scale_layouts import empty_scale
from tests.support.numeric import E4M3

FILL = {E4M3: 0x7F, torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda x: torch.empty((3, 5), dtype=x.dtype, device=x.device),
    "empty_like": lambda x: torch.empty_like(x),
    "empty_strided": lambda x: torch.empty_strided((3, 4), (1, 3), dtype=x.dtype, device=x.device),
    "new_empty": lambda x: x.new_empty(9),
    "resize_": lambda x: x[:0].clone().resize_(64),
}


@pytest.mark.parametrize("dtype", FILL)
@pytest.mark.parametrize("way", WAYS)
def test_fresh_memory_is_nan(way: str, dtype: torch.dtype, device: torch.device) -> None:
    fresh = WAYS[way](torch.zeros(7, dtype=dtype, device=device))
    assert fresh.device.type == device.type
    assert (fresh.view(BITS[fresh.itemsize]) == FILL[dtype]).all()


def test_padding_of_scales_is_nan(device: torch.device) -> None:
    rowwise = empty_scale((5, 300), BLOCKS_1X128, device)
    square = empty_scale((2, 300, 300), BLOCKS_128X128, device)
    for scale, floats in ((rowwise, 3 * 8), (square, 2 * 3 * 4)):
        whole = torch.empty(0, device=device).set_(scale.untyped_storage())
        assert whole.numel() == floats
        assert whole.isnan().all()
