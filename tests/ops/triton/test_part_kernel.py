"""The kernels for parts of a matrix, compiled for sm_90: nothing spills, even columns load wide."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from blocktensor.ops.triton.part import plan_part
from tests.sm90 import compile_for_sm90

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", "pow2"])
@pytest.mark.parametrize("cast", [False, True], ids=["amax", "cast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("shape", "row"), [((1024, 4096), 0), ((1000, 4096), 100), ((7, 130), 3)], ids=str
)
def test_resources(
    shape: tuple[int, int], row: int, dtype: torch.dtype, cast: bool, power_of_two: bool
) -> None:
    x, amax = torch.empty(shape, dtype=dtype, device="meta"), torch.empty(9, 32, device="meta")
    data = torch.empty(shape, dtype=E4M3, device="meta") if cast else None
    found = compile_for_sm90(plan_part(x, amax, data, row, 0, power_of_two))
    assert found.spilled_bytes == 0
    assert ("LDG.E.128" in found.sass) == (shape[1] % 128 == 0)
