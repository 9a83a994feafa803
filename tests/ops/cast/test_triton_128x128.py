"""The kernels for parts of a matrix, compiled for sm_90: nothing spills, even columns load wide."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from blocktensor.ops.cast.triton_128x128 import plan_shard
from blocktensor.ops.formats import BLOCKS_128X128, BLOCKS_128X128_POW2, BlockFormat
from tests.support.numeric import E4M3
from tests.support.sm90 import compile_for_sm90


@pytest.mark.parametrize(
    "format", [BLOCKS_128X128, BLOCKS_128X128_POW2], ids=lambda format: format.name
)
@pytest.mark.parametrize("cast", [False, True], ids=["amax", "cast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("shape", "row"), [((1024, 4096), 0), ((1000, 4096), 100), ((7, 130), 3)], ids=str
)
def test_resources(
    shape: tuple[int, int], row: int, dtype: torch.dtype, cast: bool, format: BlockFormat
) -> None:
    x, amax = torch.empty(shape, dtype=dtype, device="meta"), torch.empty(9, 32, device="meta")
    data = torch.empty(shape, dtype=E4M3, device="meta") if cast else None
    found = compile_for_sm90(plan_shard(x, amax, data, format, row, 0))
    assert found.spilled_bytes == 0
    assert ("LDG.E.128" in found.sass) == (shape[1] % 128 == 0)
