"""Casts of tokens in groups compile for sm_90, without a GPU, and spill nothing."""

from __future__ import annotations

import itertools

import pytest
import torch

from blocktensor.ops.formats import (
    ACTIVATION_FORMATS,
    WEIGHT_FORMATS,
    ScaleRounding,
    group_columns,
)
from blocktensor.ops.scale_layouts import empty_quantized

pytest.importorskip("triton")

from blocktensor.ops.cast.gluon_columnwise import plan_columnwise
from blocktensor.ops.cast.triton_cast import plan_1x128
from tests.support.sm90 import TUNED, compile_for_sm90

META = torch.device("meta")
TOKENS = 401


@pytest.mark.parametrize("plan", [plan_columnwise, plan_1x128], ids=lambda plan: plan.__module__)
@pytest.mark.parametrize(
    ("dtype", "k", "experts", "rowwise", "indexed", "square"),
    [
        *itertools.product(
            [torch.bfloat16, torch.float32], [2048], [8], [True, False], [False], [False, True]
        ),
        (torch.bfloat16, 2048, 8, True, True, False),
        (torch.float16, 136, 256, True, False, False),
        (torch.float16, 136, 256, True, True, True),
        (torch.float32, 130, 1000, True, True, False),
        (torch.float32, 130, 1000, True, True, True),
    ],
    ids=str,
)
def test_grouped_casts(
    plan: object,
    dtype: torch.dtype,
    k: int,
    experts: int,
    rowwise: bool,
    indexed: bool,
    square: bool,
) -> None:
    x = torch.empty((TOKENS, k), dtype=dtype, device=META)
    offs = torch.empty(experts, dtype=torch.int32, device=META)
    index = torch.empty(TOKENS, dtype=torch.int64, device=META) if indexed else None
    rounding: ScaleRounding = "power_of_two" if k == 136 else "fp32"
    format = ACTIVATION_FORMATS[rounding]
    columnwise_format = WEIGHT_FORMATS[rounding] if square else format
    row = empty_quantized((TOKENS, k), format, META) if rowwise else None
    col = empty_quantized((k, group_columns(TOKENS, experts)), columnwise_format, META)
    launch = plan(x, row, col, offs, index)  # type: ignore[operator]
    assert compile_for_sm90(launch).spilled_bytes <= (0 if TUNED else 192)
